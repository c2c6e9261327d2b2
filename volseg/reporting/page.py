"""Write a report as one self-contained HTML page, and in short as Markdown.

Style, the few lines of script that sort tables, drawings and pictures are in the page. Browsers are told to load
nothing besides (Content-Security-Policy), so that even a name that passed as markup would have no effect.
"""

import base64
import hashlib
import io
from collections.abc import Collection, Iterable, Sequence
from importlib import resources

from PIL import Image

from volseg.formatting import format_table
from volseg.reporting import content
from volseg.reporting.drawing import Markup, draw_boxes, draw_chart, draw_legend, join, tag
from volseg.streams import make_printable

LONG = 24
"""Rows from which a table scrolls within its own box."""


def write_page(report: content.ReportContent) -> str:
    """Return the page."""
    named = [(f"s{number}", section) for number, section in enumerate(report.sections) if not section.only_brief]
    links = [tag("li", tag("a", section.title, href=f"#{name}")) for name, section in named]
    body = [
        _write_header(report),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *(_write_section(name, section) for name, section in named)),
    ]
    return write_document(f"{report.title}: {report.subtitle}", body, "report.css", [read_part("report.js")])


def read_part(name: str) -> Markup:
    """Return a file of this package that pages include verbatim."""
    return Markup(resources.files(__package__).joinpath(name).read_text("utf-8"))


def write_document(title: str, body: Sequence[Markup], style: str, scripts: Sequence[Markup]) -> str:
    """Return a page that loads nothing and runs only ``scripts``.

    Parameters
    ----------
    title : str
        Of the window.
    body : sequence of Markup
        What the page shows.
    style : str
        File of this package.
    scripts : sequence of Markup
        Run in this order, below the body.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {sources}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),  # else a browser asks a server for one
        tag("style", read_part(style)),
    )
    shown = tag("body", *body, *(tag("script", script) for script in scripts))
    return f"<!DOCTYPE html>\n{tag('html', head, shown, lang='en')}\n"


def _write_header(report: content.ReportContent) -> Markup:
    state = tag("span", report.state, class_=f"state {report.state.partition(' ')[0].strip(',')}")
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in report.headline]
    return tag(
        "header",
        tag("h1", report.title, state),
        tag("p", report.subtitle, class_="subtitle"),
        tag("dl", *pairs, class_="headline"),
        tag("p", report.written, class_="written"),
    )


def _write_section(name: str, section: content.Section) -> Markup:
    blocks = [_write(block) for block in section.blocks]
    return tag("section", tag("h2", section.title), *blocks, id=name, class_="warns" if section.warns else None)


def _write(block: content.Block) -> Markup:
    match block:
        case content.Text():
            return tag("p", block.text)
        case content.Items():
            return tag("ul", *(tag("li", item) for item in block.items))
        case content.NamedValues():
            pairs = [join([tag("dt", name), tag("dd", value)]) for name, value in block.facts.items()]
            return tag("dl", *pairs, class_="facts")
        case content.TextTable():
            return _write_table(block)
        case content.Charts():
            return tag("div", *map(_write_chart, block.charts), class_="charts")
        case content.Pictures():
            legend = [_draw_names(block.legend)] if block.legend else []
            pictures = tag("div", *map(_write_picture, block.pictures), class_="pictures")
            return join([tag("h3", block.title), *legend, pictures])
        case content.Code():
            return tag("details", tag("summary", block.title), tag("pre", block.text, tabindex=0))
        case content.Commands():
            return join([join([tag("p", what), tag("pre", line, tabindex=0)]) for what, line in block.commands])


def _draw_names(names: Iterable[str]) -> Markup:
    return draw_legend([(name, number) for number, name in enumerate(names)])


def _write_table(block: content.TextTable) -> Markup:
    words = [_is_words([row[column] for row in block.rows]) for column in range(len(block.header))]
    heads = [
        tag(
            "th",
            tag("button", name, type="button") if block.sortable else name,
            scope="col",
            class_=words[column] and "words",
        )
        for column, name in enumerate(block.header)
    ]
    rows = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=words[column] and "words") for column, cell in enumerate(row[1:], start=1)),
            class_="bold" if number in block.bold else None,
        )
        for number, row in enumerate(block.rows)
    ]
    # The caption is outside of the table, which may be wider than the page on a phone.
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), aria_label=block.caption)
    kind = "scroll long" if len(rows) > LONG else "scroll"
    # To be scrolled by keys, a box must take the focus.
    box = tag("div", table, class_=kind, tabindex=0, role="region", aria_label=f"{block.caption}: table")
    return join([tag("p", block.caption, class_="caption"), box])


def _write_chart(chart: content.Chart | content.Boxes) -> Markup:
    unit = [tag("span", f" ({chart.unit})")] if chart.unit else []
    caption = tag("figcaption", chart.title, *unit)
    if isinstance(chart, content.Boxes):
        return tag("figure", caption, draw_boxes(chart))
    legend = [draw_legend([(line.name, line.colour) for line in chart.lines])] if len(chart.lines) > 1 else []
    return tag("figure", caption, draw_chart(chart), *legend)


def _write_picture(picture: content.Picture) -> Markup:
    """Return a picture as JPEG: a sixth of the file's size, with sharp lines, as there is no subsampling."""
    with Image.open(picture.file) as image:
        width, height = image.size
        packed = io.BytesIO()
        image.convert("RGB").save(packed, "JPEG", quality=82, subsampling=0)
    source = f"data:image/jpeg;base64,{base64.b64encode(packed.getvalue()).decode()}"
    shown = tag("img", src=source, alt=picture.alt, width=width, height=height)
    return tag("figure", tag("figcaption", picture.title), shown)


def _is_words(cells: list[str]) -> bool:
    """Return whether a column holds words, not numbers, and is aligned to the left."""
    return any(cell and cell != "infinite" and not (cell[0].isdigit() or cell[0] in "-+") for cell in cells)


def write_markdown(report: content.ReportContent, sections: Collection[str] | None = None) -> str:
    """Return the short form, or those of its sections; drawings, pictures and what is long are left to the page."""
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
    r"""Return a text in which no name can become a tag, link or image of the rendered page.

    A backslash before ``<`` would not do, as a name may end with one.

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
