"""Check a list of cases for every layout: unique cases, separate files, valid names for predictions."""

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path, PureWindowsPath

from volseg.data.cases import Case
from volseg.data.dicom.labels import find_dicom_label
from volseg.data.readers import list_case_files, list_files, match_suffix
from volseg.errors import DataError
from volseg.files import require_text
from volseg.formatting import list_duplicates, list_some
from volseg.launched import read_launch

logger = logging.getLogger(__name__)


@cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line about a data set once per job: a command that plans and trains reads the data set several times."""
    if (launch := read_launch()) is None or launch.rank == 0:
        logger.log(level, "%s", line)


LONGEST_NAME, LONGEST_PATH = 200, 1000
"""Most bytes of a file's name (255 in most file systems) and most characters of a declared path."""


def list_images(folder: Path) -> list[Path]:
    """Return the files of a folder with an image's suffix, sorted; hidden ones, such as macOS' ``._``, are left out.

    Raises
    ------
    ConfigError
        If a name is no UTF-8.
    """
    found = sorted(path for path in folder.iterdir() if match_suffix(path) and not path.name.startswith("."))
    for path in found:
        require_text(path.name, f"an image in {folder}")
    return found


def list_labels(folder: Path) -> list[Path]:
    """Return the files of a folder that `list_images` lists, and the DICOM segmentations and structure sets, sorted."""
    others = (path for path in folder.iterdir() if path.is_file() and not match_suffix(path))
    labels = (path for path in others if not path.name.startswith(".") and find_dicom_label(path))
    return sorted([*list_images(folder), *labels])


def sort_cases(
    training: Iterable[Case], test: Iterable[Case], source: Path, *, require_files: bool
) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases of a data set, sorted by id; test cases without files are left out.

    Raises
    ------
    DataError
        If there is no training case, a case occurs twice, two share a file, or a training file is absent.
    ConfigError
        If a case or one of its files has a name that is no UTF-8.
    """
    training, test = (sorted(cases, key=lambda case: case["case"]) for cases in (training, test))
    for case in (*training, *test):
        require_text([case["case"], *list_case_files(case)], f"a case of {source} or a file of it")
    if not training:
        raise DataError(
            f"{source} declares no training cases; needed: 'training': [{{'image': ..., 'label': ...}}, ...]"
        )
    if doubled := list_duplicates(case["case"] for case in [*training, *test]):
        raise DataError(
            f"{source} declares {len(doubled)} case(s) more than once, first {doubled[0]!r}; keep each once"
        )
    _refuse_shared_files([*training, *test], source)
    absent = [path for case in training for path in list_case_files(case) if not path.exists()] if require_files else []
    if absent:
        shown = list_some([str(_shorten(path, source)) for path in absent])
        raise DataError(
            f"{source} declares {len(absent)} absent file(s): {shown}; fetch them, or take the cases out of the list"
        )
    return tuple(training), tuple(_drop_absent(test, source))


def require_id(name: str, where: str) -> str:
    """Return the id of a case, which names its prediction.

    Raises
    ------
    DataError
        If it is no valid file name.
    """
    name = name.strip()
    is_plain = not name.startswith(".") and not any(letter in name for letter in "/\\\0\n\r")
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        is_plain, length = False, 0
    if not name or not is_plain or length > LONGEST_NAME:
        raise DataError(
            f"{where} calls a case {name[:40]!r}; needed: a name that a file can have, without slashes, of "
            f"{LONGEST_NAME} bytes at most"
        )
    return name


def join_inside(folder: Path, text: str, where: str) -> Path:
    """Join a declared path to the data set's folder; it must stay inside (links inside may lead out)."""
    path = split_path(text, where)
    if path.anchor or ".." in path.parts or not path.parts:
        raise DataError(f"{where} names {text.strip()!r}; needed: a path inside the task's folder, relative to it")
    return folder.joinpath(*path.parts)


def split_path(text: str, where: str) -> PureWindowsPath:
    """Return a path from any system, split at both kinds of slash.

    Raises
    ------
    DataError
        If it is no valid file name.
    """
    text = text.strip()
    try:
        longest = max((len(os.fsencode(part)) for part in PureWindowsPath(text).parts), default=0)
    except UnicodeEncodeError:
        raise DataError(f"{where} names {text!r}, which no file can be called") from None
    if longest > LONGEST_NAME or len(text) > LONGEST_PATH or "\0" in text:
        raise DataError(
            f"{where} names {text[:40]!r}..., of {len(text)} characters, which no file can be called; needed: names of "
            f"{LONGEST_NAME} bytes at most, which leave room for those of predictions"
        )
    return PureWindowsPath(text)


def _refuse_shared_files(cases: Sequence[Case], source: Path) -> None:
    """Raise if a file is given for two fields or cases: one would learn from the other's label."""
    if doubled := list_duplicates(str(path) for case in cases for path in list_case_files(case)):
        raise DataError(
            f"{source} names {len(doubled)} file(s) more than once, first {_shorten(Path(doubled[0]), source)}; each "
            "image and each label needs a file of its own"
        )


def _shorten(path: Path, source: Path) -> Path:
    return path.relative_to(source.parent) if path.is_relative_to(source.parent) else path


def _drop_absent(test: Sequence[Case], source: Path) -> list[Case]:
    """Leave out test cases without files: training does not need them."""
    present = [case for case in test if all(path.exists() for path in list_files(case["image"]))]
    if len(present) < len(test):
        logger.warning(
            "%s: %d of %d declared test images are absent and left out",
            source.parent,
            len(test) - len(present),
            len(test),
        )
    return present
