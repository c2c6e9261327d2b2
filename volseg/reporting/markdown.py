"""A report in short, as Markdown: its headline, and the sections that say so."""

from collections.abc import Collection, Sequence

from volseg.reporting.content import Block, Commands, Items, NamedValues, ReportContent, Text, TextTable
from volseg.streams import make_printable

__all__ = ["write_markdown"]


def write_markdown(report: ReportContent, sections: Collection[str] | None = None) -> str:
    """Return the short form, or those of its sections; drawings, pictures and what is long are left to the page."""
    told = "; ".join(f"{name} {value}" for name, value in report.headline)
    headline = f"{report.subtitle}. {report.state.capitalize()}: {told}."
    lines = [f"# {_escape(report.title)}", "", _escape(headline), ""]
    for section in report.sections:
        if section.brief and (sections is None or section.title in sections):
            lines += [f"## {section.title}", ""]
            for block in section.blocks:
                lines += _write(block)
    return make_printable("\n".join(lines))


def _escape(text: str) -> str:
    r"""Return a text of which a page that is made of it shows no tag, link or image, whatever names are in it.

    A backslash before ``<`` would not do, as a name may end with one.

    Examples
    --------
    >>> _escape("liver<script>, ![x](http://y)")
    'liver&lt;script>, ![x]\\(http://y)'
    """
    return text.replace("<", "&lt;").replace("](", r"]\(")


def _write(block: Block) -> list[str]:
    match block:
        case Text():
            return [_escape(block.text), ""]
        case Items():
            return [*("- " + _escape(item).replace("\n", "\n  ") for item in block.items), ""]
        case NamedValues():
            return [*("- " + _escape(f"{name}: {value}") for name, value in block.facts.items()), ""]
        case TextTable():
            return [*_write_table([block.header, *block.rows]), ""]
        case Commands():
            return [line for what, command in block.commands for line in (_escape(what), "", *_write_code(command), "")]
        case _:
            return []


def _write_code(command: str) -> list[str]:
    """Return the lines of a block in which nothing is markup."""
    return [f"    {line}" for line in command.split("\n")]


def _write_table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_escape(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    first, *rest = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    )
    return [first, "| " + " | ".join("-" * width for width in widths) + " |", *rest]
