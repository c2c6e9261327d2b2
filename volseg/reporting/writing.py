"""Write the report of a run, a cross-validation or a search from its folder."""

from collections.abc import Collection, Sequence
from pathlib import Path

from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.formatting import format_table
from volseg.reporting.content import Block, Commands, Items, NamedValues, ReportContent, Text, TextTable
from volseg.reporting.cross_validation import RESULTS, describe_crossed, list_fold_folders, read_crossed
from volseg.reporting.page import write_page
from volseg.reporting.reading import read_run
from volseg.reporting.run import describe_run
from volseg.reporting.search import SEARCH, describe_search, read_search
from volseg.streams import make_printable

NAME = "report.html"


def write_report(folder: str | Path, file: str | Path | None = None, *, state: str | None = None) -> Path:
    """Write the page about a run, a cross-validation or a search, in one step or not at all; return its path.

    Parameters
    ----------
    folder : path
        Of the run, the cross-validation or the search, finished or not.
    file : path, optional
        ``report.html`` in the folder by default, of a search ``search.html``.
    state : str, optional
        How the run ended, where the caller knows better than its files.

    Raises
    ------
    ConfigError
        If the folder is none of these.
    """
    page = write_page(_describe(Path(folder), state))
    own = Path(folder) / ("search.html" if (Path(folder) / SEARCH).is_file() else NAME)
    target = own if file is None else Path(file)
    with replacing(target) as partial:
        partial.write_text(page, encoding="utf-8")
    return target


def write_brief(folder: str | Path, *, state: str | None = None, sections: Collection[str] | None = None) -> str:
    """Return the short form, as Markdown.

    Parameters
    ----------
    folder, state
        As of `write_report`.
    sections : collection of str, optional
        Titles of those that are wanted, of all that the short form has.
    """
    return write_markdown(_describe(Path(folder), state), sections)


def _describe(folder: Path, state: str | None) -> ReportContent:
    if (folder / "config.yaml").is_file():
        return describe_run(read_run(folder), state)
    if (folder / RESULTS).is_file() or list_fold_folders(folder):
        return describe_crossed(read_crossed(folder))
    if (folder / SEARCH).is_file():
        return describe_search(read_search(folder))
    raise ConfigError(
        f"{folder} is no run folder and no cross-validation: it has neither config.yaml nor {RESULTS}; name the folder "
        "that `volseg train`, `volseg cross-validate` or `volseg search` made"
    )


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
    r"""Return a text in which no name can become a tag, link or image of the rendered page.

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
    return format_table(cells).split("\n")
