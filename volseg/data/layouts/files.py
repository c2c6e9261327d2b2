"""Read the cases that ``dataset.json`` lists, and check the list of cases of every layout.

In MSD's layout the file lists the files of each case. The reader tolerates differences of the ten real tasks (a count
that is off by one, misspelt keys, strings next to dicts, blanks, macOS' ``._`` files). It is strict about errors that
would spoil a training: labels, channels, ids and files. nnU-Net's first version writes the same list, for images stored
as ``CASE_0000.nii.gz``, ``CASE_0001.nii.gz`` ... The folders of its second version are read as pairs
(`volseg.data.layouts.pairs`); a list of files under ``dataset`` is refused.

References
----------
.. [1] nnU-Net 2.8.1, ``documentation/dataset_format.md``, ``nnunetv2/utilities/utils.py``.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

from volseg.data.cases import Case, Task
from volseg.data.dicom.labels import find_dicom_label
from volseg.data.layouts.declared import make_task, note_columns, read_channel_names, read_labelled, read_regions
from volseg.data.layouts.naming import image_of, log_once, number_channels
from volseg.data.readers import list_case_files, list_files, match_suffix, stem
from volseg.errors import DataError
from volseg.files import require_text
from volseg.formatting import list_duplicates, list_some

logger = logging.getLogger(__name__)


LONGEST_NAME, LONGEST_PATH = 200, 1000
"""Most bytes of a file's name (255 in most file systems) and most characters of a declared path."""


def list_images(folder: Path) -> list[Path]:
    """Return the files of a folder with an image's suffix, sorted; hidden ones, such as macOS' ``._``, are left out.

    Raises
    ------
    ConfigError
        If a name is not UTF-8.
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
        If a case or one of its files has a name that is not UTF-8.
    """
    training, test = (sorted(cases, key=lambda case: case["case"]) for cases in (training, test))
    for case in (*training, *test):
        require_text([case["case"], *list_case_files(case)], f"a case of {source} or a file of it")
    if not training:
        raise DataError(
            f"{source} lists no training cases; needed: at least one with image and label, in a table a row without "
            "'test' under 'split', in dataset.json 'training': [{'image': ..., 'label': ...}, ...]"
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
            f"{source} lists {len(absent)} file(s) that do not exist: {shown}; fetch them, or remove their cases"
        )
    return tuple(training), tuple(_drop_absent(test, source))


def require_id(name: str, where: str) -> str:
    """Return the id of a case, which names its prediction.

    Raises
    ------
    DataError
        If it is not a valid file name.
    """
    name = name.strip()
    is_plain = not name.startswith(".") and not any(letter in name for letter in "/\\\0\n\r")
    try:
        length = len(os.fsencode(name))
    except UnicodeEncodeError:
        is_plain, length = False, 0
    if not name or not is_plain or length > LONGEST_NAME:
        raise DataError(
            f"{where} calls a case {name[:40]!r}; needed: a valid file name of at most {LONGEST_NAME} bytes, without "
            "slashes and without a dot in front"
        )
    return name


def join_inside(folder: Path, text: str, where: str) -> Path:
    """Join a declared path to the data set's folder; refuse a path out of it, except through a link in it."""
    path = split_path(text, where)
    if path.anchor or ".." in path.parts or not path.parts:
        raise DataError(f"{where} names {text.strip()!r}; needed: a path inside the task's folder, relative to it")
    return folder.joinpath(*path.parts)


def split_path(text: str, where: str) -> PureWindowsPath:
    """Return a path from any system, split at both kinds of slash.

    Raises
    ------
    DataError
        If it is not a valid file name.
    """
    text = text.strip()
    try:
        longest = max((len(os.fsencode(part)) for part in PureWindowsPath(text).parts), default=0)
    except UnicodeEncodeError:
        raise DataError(f"{where} names {text!r}, which is not a valid path") from None
    if longest > LONGEST_NAME or len(text) > LONGEST_PATH or "\0" in text:
        raise DataError(
            f"{where} names {text[:40]!r}... ({len(text)} characters), which is not a valid path; needed: at most "
            f"{LONGEST_PATH} characters without NUL, and names of at most {LONGEST_NAME} bytes"
        )
    return PureWindowsPath(text)


def _refuse_shared_files(cases: Sequence[Case], source: Path) -> None:
    """Raise if a file is given for two fields or cases: one would learn from the other's label."""
    if doubled := list_duplicates(str(path) for case in cases for path in list_case_files(case)):
        raise DataError(
            f"{source} names {len(doubled)} file(s) more than once, first {_shorten(Path(doubled[0]), source)}; each "
            "image and each label needs its own file"
        )


def _shorten(path: Path, source: Path) -> Path:
    return path.relative_to(source.parent) if path.is_relative_to(source.parent) else path


def _drop_absent(test: Sequence[Case], source: Path) -> list[Case]:
    """Leave out test cases without files: training does not need them."""
    present = [case for case in test if all(path.exists() for path in list_files(case["image"]))]
    if len(present) < len(test):
        logger.warning(
            "%s: leaving out %d of %d declared test images: their files do not exist",
            source.parent,
            len(test) - len(present),
            len(test),
        )
    return present


def load_listed(manifest: Path, declared: Mapping[str, Any], *, require_files: bool) -> Task:
    """Return the task whose cases ``dataset.json`` lists; see `volseg.data.layouts.load_task`."""
    if "training" not in declared:
        raise DataError(
            f"{manifest} lists its cases under 'dataset', which volseg does not read; list them in a table (CSV), "
            "or under 'training' as MSD does"
        )
    modalities = read_channel_names(declared, manifest)
    labels = read_regions(declared, manifest)
    columns: dict[str, dict[str, str]] = {}
    read = partial(_read_cases, manifest=manifest, num_channels=len(modalities), labels=labels.labels, columns=columns)
    training = read(_list_entries(declared, "training", manifest), fields=("image", "label"))
    test = read(_list_entries(declared, "test", manifest), fields=("image",))
    log_counts(declared, {"training": training, "test": test}, manifest)
    cases = sort_cases(training, test, manifest, require_files=require_files)
    return make_task(manifest, declared, modalities, labels, cases, columns)


Entries = list[tuple[str, Any]]
"""Entries of cases, each with its place in the manifest."""


def _list_entries(declared: Mapping[str, Any], key: str, manifest: Path) -> Entries:
    entries = declared.get(key, [])
    if not isinstance(entries, list):
        raise DataError(f"{manifest}: {key!r} should be a list of cases, got {type(entries).__name__}")
    if key == "test":  # may be bare paths
        entries = [{"image": entry} if isinstance(entry, str) else entry for entry in entries]
    return [(f"{manifest}, {key}[{index}]", entry) for index, entry in enumerate(entries)]


def _read_cases(
    entries: Entries,
    *,
    fields: Sequence[str],
    manifest: Path,
    num_channels: int,
    labels: Mapping[int, str],
    columns: dict[str, dict[str, str]],
) -> list[Case]:
    """Turn entries into cases; add further facts of training to ``columns``."""
    cases = []
    for where, files in entries:
        if not isinstance(files, dict) or not all(_are_named(files.get(field), field) for field in fields):
            raise DataError(f"{where} should name {' and '.join(fields)}, got {files!r}")
        image = _locate_image(files["image"], manifest.parent, where, num_channels)
        if list_files(image)[0].name.startswith("._"):  # macOS adds one for each file of an archive
            continue
        case: Case = {"case": _name_case(files, image, manifest.parent, where), "image": image}
        if (labelled := read_labelled(files.get("labelled"), labels, where)) is not None:
            case["labelled"] = labelled
        if "label" in fields:
            case["label"] = join_inside(manifest.parent, files["label"], where)
            note_columns(files, case["case"], columns)
        cases.append(case)
    return cases


def _are_named(value: Any, field: str) -> bool:
    """Return whether an entry names a field's file, or an image's file per channel."""
    listed = value if isinstance(value, list) and value and field == "image" else [value]
    return all(isinstance(path, str) for path in listed)


def _locate_image(named: str | Sequence[str], folder: Path, where: str, num_channels: int) -> Path | tuple[Path, ...]:
    if not isinstance(named, str):
        if len(named) not in {1, num_channels}:
            raise DataError(
                f"{where} names {len(named)} image files; needed: one, or one for each of {num_channels} channel(s)"
            )
        return image_of([join_inside(folder, path, where) for path in named])
    path = join_inside(folder, named, where)
    ending = path.name[len(stem(path)) :]
    channels = [path.with_name(f"{stem(path)}_{number:04d}{ending}") for number in range(num_channels)]
    return image_of(channels) if not path.exists() and channels[0].exists() else path


def _name_case(files: Mapping[str, Any], image: Path | tuple[Path, ...], folder: Path, where: str) -> str:
    """Return the id of a case: that of its entry, else its image's name, without a channel's number."""
    if isinstance(own := files.get("case"), str):
        return require_id(own, where)
    if isinstance(files["image"], str):
        return stem(join_inside(folder, files["image"], where))
    first = stem(list_files(image)[0])
    numbered = number_channels(first)
    return first if numbered is None else numbered[0]


def log_counts(
    declared: Mapping[str, Any], cases: Mapping[str, Sequence[Case]], manifest: Path, level: int = logging.INFO
) -> None:
    """Log a wrong numTraining or numTest: the real Task08 is off by one."""
    for key, found in cases.items():
        count = declared.get(f"num{key.capitalize()}", len(found))
        if count != len(found):
            log_once(f"{manifest}: num{key.capitalize()} is {count}, but {len(found)} cases were found", level)
