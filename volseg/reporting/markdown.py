"""A report in short, as Markdown: its headline, and the sections that say so."""

from collections.abc import Collection, Sequence

from volseg.reporting.content import Block, Commands, Items, NamedValues, ReportContent, Text, TextTable

__all__ = ["write_markdown"]


def write_markdown(report: ReportContent, sections: Collection[str] | None = None) -> str:
    """Return the short form, or those of its sections; drawings, pictures and what is long are left to the page."""
    told = "; ".join(f"{name} {value}" for name, value in report.headline)
    lines = [f"# {report.title}", "", f"{report.subtitle}. {report.state.capitalize()}: {told}.", ""]
    for section in report.sections:
        if section.brief and (sections is None or section.title in sections):
            lines += [f"## {section.title}", ""]
            for block in section.blocks:
                lines += _write(block)
    # What a browser would take for markup where the short form is shown as a page.
    return "\n".join(lines).replace("<", r"\<")


def _write(block: Block) -> list[str]:
    match block:
        case Text():
            return [block.text, ""]
        case Items():
            return [*("- " + item.replace("\n", "\n  ") for item in block.items), ""]
        case NamedValues():
            return [*(f"- {name}: {value}" for name, value in block.facts.items()), ""]
        case TextTable():
            return [*_write_table([block.header, *block.rows]), ""]
        case Commands():
            return [line for what, command in block.commands for line in (what, "", f"    {command}", "")]
        case _:
            return []


def _write_table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    first, *rest = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    )
    return [first, "| " + " | ".join("-" * width for width in widths) + " |", *rest]
