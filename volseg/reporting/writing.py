"""A run's or a cross-validation's folder to its report."""

from collections.abc import Collection
from pathlib import Path

from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.reporting.content import ReportContent
from volseg.reporting.crossed import RESULTS, describe_crossed, find_fold_folders, read_crossed
from volseg.reporting.markdown import write_markdown
from volseg.reporting.page import write_page
from volseg.reporting.reading import read_run
from volseg.reporting.run import describe_run

__all__ = ["NAME", "write_brief", "write_report"]

NAME = "report.html"


def write_report(folder: str | Path, file: str | Path | None = None, *, state: str | None = None) -> Path:
    """Write the page about a run or a cross-validation, in one step or not at all; return its path.

    Parameters
    ----------
    folder : path
        Of the run or the cross-validation, finished or not.
    file : path, optional
        ``report.html`` in the folder by default.
    state : str, optional
        How the run ended, where the caller knows better than its files.

    Raises
    ------
    ConfigError
        If the folder is neither.
    """
    page = write_page(_describe(Path(folder), state))
    target = Path(folder) / NAME if file is None else Path(file)
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
    if (folder / RESULTS).is_file() or find_fold_folders(folder):
        return describe_crossed(read_crossed(folder))
    raise ConfigError(
        f"{folder} is no run folder and no cross-validation: it has neither config.yaml nor {RESULTS}; name the folder "
        "that `volseg train` or `volseg cross-validate` made"
    )
