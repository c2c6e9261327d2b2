"""Report the results of a run from the files of its folder, as a page for browsers and in short form for terminals.

The content (`volseg.reporting.content`) is read from a folder and written twice: as ``report.html``, a self-contained
file, and in short form as ``report.md``. This package does not import torch, not even indirectly.
"""

from collections.abc import Collection
from pathlib import Path

from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.reporting.content import ReportContent
from volseg.reporting.page import write_markdown, write_page
from volseg.reporting.reading import read_run
from volseg.reporting.run import describe_run
from volseg.reporting.several_runs import (
    RESULTS,
    SEARCH,
    describe_crossed,
    describe_search,
    list_fold_folders,
    read_crossed,
    read_search,
)

__all__ = ["NAME", "write_brief", "write_report"]

NAME = "report.html"


def write_report(folder: str | Path, file: str | Path | None = None, *, state: str | None = None) -> Path:
    """Write the page about a run, a cross-validation or a search, atomically; return its path.

    Parameters
    ----------
    folder : path
        Of the run, the cross-validation or the search, finished or not.
    file : path, optional
        By default ``report.html`` in the folder, or ``search.html`` for a search.
    state : str, optional
        State of the run, if the caller knows more than the files.

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
        See `write_report`.
    sections : collection of str, optional
        Titles of the sections to include; all sections of the short form by default.
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
        f"{folder} has none of config.yaml, {RESULTS} and {SEARCH}; name a folder that `volseg train`, "
        "`volseg cross-validate` or `volseg search` wrote"
    )
