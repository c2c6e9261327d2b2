"""Write a report as one self-contained HTML page, and in short form as Markdown.

The page contains its style, the few lines of script that sort tables, drawings and pictures. Jinja escapes everything
that its templates print (``autoescape``), and the Content-Security-Policy forbids browsers to load anything else, so
that even a name that passed as markup would have no effect.
"""

import base64
import hashlib
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from volseg.formatting import format_table
from volseg.reporting import content
from volseg.reporting.drawing import draw, draw_legend
from volseg.streams import make_printable

HERE = Path(__file__).parent


def write_page(report: content.ReportContent) -> str:
    """Return the page."""
    return write_document(
        "report",
        [read_part("report.js")],
        title=f"{report.title}: {report.subtitle}",
        report=report,
        sections=[section for section in report.sections if not section.only_brief],
    )


def read_part(name: str) -> str:
    """Return the content of a file of this package that pages include verbatim."""
    return (HERE / name).read_text("utf-8")


def write_document(name: str, scripts: Sequence[str], **values: Any) -> str:
    """Return a page that loads nothing and runs only ``scripts``.

    Parameters
    ----------
    name : str
        Name of the template and of its style sheet.
    scripts : sequence of str
        Run in this order, after the body.
    **values
        Variables of the template.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        kind=lambda block: type(block).__name__, words=_detect_words, draw=draw, legend=_draw_names, pack=_pack
    )
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {sources}"
    style = read_part(f"{name}.css")
    return environment.get_template(f"{name}.html").render(policy=policy, style=style, scripts=scripts, **values)


def _draw_names(names: Sequence[str]) -> Markup:
    return draw_legend([(name, number) for number, name in enumerate(names)])


def _pack(picture: content.Picture) -> tuple[int, int, str]:
    """Return the size of a picture, and the picture as JPEG: a sixth of the bytes, without chroma subsampling.

    For a picture that cannot be read, a browser shows the alternative text.
    """
    try:
        with Image.open(picture.file) as image:
            packed = io.BytesIO()
            image.convert("RGB").save(packed, "JPEG", quality=82, subsampling=0)
            return *image.size, f"data:image/jpeg;base64,{base64.b64encode(packed.getvalue()).decode()}"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # Pillow's for damaged files
        return 0, 0, "data:,"


def _detect_words(table: content.TextTable) -> list[bool]:
    """Return whether each column holds words, not numbers, and is aligned to the left."""
    return [any(_is_word(row[column]) for row in table.rows) for column in range(len(table.header))]


def _is_word(cell: str) -> bool:
    return bool(cell) and cell != "infinite" and not (cell[0].isdigit() or cell[0] in "-+")


def write_markdown(report: content.ReportContent, sections: Collection[str] | None = None) -> str:
    """Return the short form, or some sections of it; only the page has drawings, pictures and long texts."""
    told = "; ".join(f"{name} {value}" for name, value in report.headline)
    headline = f"{report.subtitle}. {report.state.capitalize()}: {told}."
    lines = [f"# {_escape(report.title)}", "", _escape(headline), ""]
    for section in report.sections:
        if section.brief and (sections is None or section.title in sections):
            lines += [f"## {section.title}", ""]
            for block in section.blocks:
                lines += _list_lines(block)
    return make_printable("\n".join(lines))


def _escape(text: str) -> str:
    r"""Escape a text, so that no name can become a tag, link or image of the rendered page.

    A backslash before ``<`` is not enough, as a name may end with a backslash.

    Examples
    --------
    >>> _escape("liver<script>, ![x](http://y)")
    'liver&lt;script>, ![x]\\(http://y)'
    """
    return text.replace("<", "&lt;").replace("](", r"]\(")


def _list_lines(block: content.Block) -> list[str]:
    match block:
        case content.Text():
            return [_escape(block.text), ""]
        case content.Items():
            return [*("- " + _escape(item).replace("\n", "\n  ") for item in block.items), ""]
        case content.NamedValues():
            return [*("- " + _escape(f"{name}: {value}") for name, value in block.facts.items()), ""]
        case content.TextTable():
            return [*_tabulate([block.header, *block.rows]), ""]
        case content.Commands():
            return [line for what, command in block.commands for line in (_escape(what), "", *_indent(command), "")]
        case _:
            return []


def _indent(command: str) -> list[str]:
    """Return the lines of a block in which nothing is markup."""
    return [f"    {line}" for line in command.split("\n")]


def _tabulate(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_escape(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    return format_table(cells).split("\n")
