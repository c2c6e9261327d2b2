"""From a task folder in the layout of the Medical Segmentation Decathlon to its cases.

``dataset.json`` is read tolerantly where the ten real ones differ (a count that is off by one, misspelt keys, strings
beside dicts, blanks, macOS' ``._`` files) and strictly where a slip would cost a training: labels, channels, ids and
files.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from volseg.data.cases import Case, Task
from volseg.data.json_files import read_json
from volseg.data.names import find_doubled, list_some
from volseg.data.readers import stem
from volseg.errors import DataError

__all__ = ["find_task", "load_task", "read_labels", "read_modalities"]

logger = logging.getLogger(__name__)

LONGEST_NAME, LONGEST_PATH = 200, 1000
"""Bytes of a file's name (255 to most file systems) and characters of a declared path."""

IMAGE_FOLDERS = ("imagesTr", "labelsTr", "imagesTs")


def load_task(root: str | Path, *, require_files: bool = True) -> Task:
    """Read what a task folder declares; no image is opened.

    Parameters
    ----------
    root
        The ``TaskNN_Name`` folder, or one level above or below it.
    require_files
        Refuse a declared training file that is absent. ``False`` leaves that to the data check, which names the case.

    Raises
    ------
    DataError
        The folder is no MSD task, or its ``dataset.json`` cannot be trusted; the message says what to mend.
    """
    folder = find_task(root)
    manifest = folder / "dataset.json"
    declared = read_json(manifest)
    if not isinstance(declared, dict):
        raise DataError(f"{manifest} should hold a JSON object, got {type(declared).__name__}")
    if "channel_names" in declared and not {"training", "modality"} <= declared.keys():
        raise DataError(
            f"{manifest} is nnU-Net's, not MSD's: it lacks 'modality' or a list of 'training' cases; add both, and put "
            "the channels of a case (CASE_0000.nii.gz, CASE_0001.nii.gz ...) into one 4D file"
        )
    training = _read_cases(declared.get("training"), "training", folder)
    test = _read_cases(declared.get("test", []), "test", folder)
    if not training:
        raise DataError(
            f"{manifest} declares no training cases; needed: 'training': [{{'image': ..., 'label': ...}}, ...]"
        )
    _refuse_doubles([*training, *test], manifest)
    _refuse_shared_files([*training, *test], manifest)
    _tell_counts(declared, training=training, test=test, manifest=manifest)
    if require_files:
        _refuse_absent(training, manifest)
    return Task(
        name=folder.name if re.match(r"Task\d\d_", folder.name) else str(declared.get("name", folder.name)).strip(),
        root=folder,
        modalities=read_modalities(declared.get("modality"), manifest),
        labels=read_labels(declared.get("labels"), manifest),
        training=tuple(training),
        test=tuple(_drop_absent(test, folder)),
    )


def find_task(root: str | Path) -> Path:
    """Return the folder with ``dataset.json``: ``root``, the only one below it, or the one above its image folder.

    A folder of the same name inside the task's folder, as archives leave it, counts as the same level.
    """
    root = Path(os.path.abspath(root))  # the folder's own name counts, so links are not resolved
    if not root.exists():
        raise DataError(f"{root} does not exist; name the TaskNN_Name folder of an MSD task")
    if root.name == "dataset.json":
        root = root.parent
    if (root / "dataset.json").is_file():
        return root
    if root.name in IMAGE_FOLDERS and (root.parent / "dataset.json").is_file():
        return root.parent
    children = [child for child in sorted(root.glob("*/")) if not child.name.startswith((".", "_"))]
    below = [
        folder for child in children for folder in (child, child / child.name) if (folder / "dataset.json").is_file()
    ]
    if len(below) > 1:
        raise DataError(f"{root} holds {len(below)} tasks: {', '.join(path.name for path in below)}; name one of them")
    if not below:
        raise DataError(
            f"{root} is no MSD task: there is no dataset.json in it, in a folder of it, or above it; "
            "needed: dataset.json beside imagesTr and labelsTr"
        )
    return below[0]


def read_modalities(declared: Any, source: Path, key: str = "modality") -> tuple[str, ...]:
    """Return the channel names that ``source`` declares: {"0": "MRI"} in tasks, a list by some tools.

    Raises
    ------
    DataError
        There are none, or one is no name.
    """
    names = declared if isinstance(declared, list) and declared else _sort_by_number(declared, key, source)
    return tuple(_require_names(names, key, source))


def read_labels(declared: Any, source: Path) -> dict[int, str]:
    """Return the name of each label that ``source`` declares as {"0": "background", "1": ...}.

    Raises
    ------
    DataError
        There are fewer than two, numbers are left out, or a name is none or given twice.
    """
    labels = dict(enumerate(_require_names(_sort_by_number(declared, "labels", source), "labels", source)))
    if len(labels) < 2:
        raise DataError(
            f"{source} declares the labels {labels}; needed: 0 for the background and at least one structure"
        )
    if doubled := find_doubled(labels.values()):
        raise DataError(f"{source} gives the name {doubled[0]!r} to several labels; metrics are reported by name")
    return labels


def _require_names(names: Sequence[Any], key: str, source: Path) -> list[str]:
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{source}: {key!r} should give {number} a name, got {name!r}; reports go by names")
    return [name.strip() for name in names]


def _sort_by_number(mapping: Any, key: str, manifest: Path) -> list[Any]:
    """Return the values of {"0": ..., "1": ...} in numeric order; the keys must count from 0 without a gap."""
    wanted = f"{manifest}: {key!r} should map the numbers 0, 1, 2 ... to names"
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f"{wanted}, got {mapping!r}")
    try:
        by_number = {int(number): name for number, name in mapping.items()}
    except ValueError:
        raise DataError(f"{wanted}, got the keys {list(mapping)}") from None
    if sorted(by_number) != list(range(len(mapping))):
        raise DataError(f"{wanted} without a gap, got the keys {list(mapping)}; renumber them, in the label files too")
    return [by_number[number] for number in range(len(mapping))]


def _read_cases(entries: Any, key: str, folder: Path) -> list[Case]:
    """Turn the entries (dicts, or bare paths for test cases) into cases, sorted by id."""
    if not isinstance(entries, list):
        raise DataError(f"{folder / 'dataset.json'}: {key!r} should be a list of cases, got {type(entries).__name__}")
    fields = ("image", "label") if key == "training" else ("image",)
    cases = []
    for index, entry in enumerate(entries):
        files = {"image": entry} if isinstance(entry, str) and key == "test" else entry
        where = f"{folder / 'dataset.json'}, {key}[{index}]"
        if not isinstance(files, dict) or not all(isinstance(files.get(field), str) for field in fields):
            raise DataError(f"{where} should name {' and '.join(fields)}, got {entry!r}")
        paths = {field: _join_inside(folder, files[field], where) for field in fields}
        if paths["image"].name.startswith("._"):  # macOS leaves one beside each file of an archive
            continue
        cases.append({"case": stem(paths["image"]), **paths})
    return sorted(cases, key=lambda case: case["case"])


def _join_inside(folder: Path, text: str, where: str) -> Path:
    """Join a declared path to the task's folder; it must not lead out of it (links inside it may)."""
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
    path = PureWindowsPath(text)  # splits at both kinds of slash
    if path.anchor or ".." in path.parts or not path.parts:
        raise DataError(f"{where} names {text!r}; needed: a path inside the task's folder, relative to it")
    return folder.joinpath(*path.parts)


def _refuse_doubles(cases: Sequence[Case], manifest: Path) -> None:
    if doubled := find_doubled(case["case"] for case in cases):
        raise DataError(
            f"{manifest} declares {len(doubled)} case(s) more than once, first {doubled[0]!r}; keep each once"
        )


def _refuse_shared_files(cases: Sequence[Case], manifest: Path) -> None:
    """Raise where a file stands for two fields or cases: one would learn from the other's label."""
    doubled = find_doubled(str(case[field]) for case in cases for field in ("image", "label") if field in case)
    if doubled:
        first = Path(doubled[0]).relative_to(manifest.parent)
        raise DataError(
            f"{manifest} names {len(doubled)} file(s) more than once, first {first}; each image and each label needs a "
            "file of its own"
        )


def _refuse_absent(cases: Sequence[Case], manifest: Path) -> None:
    absent = [case[field] for case in cases for field in ("image", "label") if not case[field].exists()]
    if absent:
        shown = list_some([str(path.relative_to(manifest.parent)) for path in absent])
        raise DataError(
            f"{manifest} declares {len(absent)} absent file(s): {shown}; fetch them, or take the cases out of the list"
        )


def _drop_absent(test: Sequence[Case], folder: Path) -> list[Case]:
    """Leave out test cases that were not fetched: training does not need them."""
    present = [case for case in test if case["image"].exists()]
    if len(present) < len(test):
        logger.warning(
            "%s: %d of %d declared test images are absent and left out", folder, len(test) - len(present), len(test)
        )
    return present


def _tell_counts(declared: Mapping[str, Any], *, manifest: Path, **cases: Sequence[Case]) -> None:
    """Log where numTraining or numTest is off: the real Task08 is, by one."""
    for key, found in cases.items():
        count = declared.get(f"num{key.capitalize()}", len(found))
        if count != len(found):
            logger.info("%s: num%s is %s, but %d cases are listed", manifest, key.capitalize(), count, len(found))
