"""Data sets that ``dataset.json`` describes: tasks of the Medical Segmentation Decathlon, and nnU-Net's raw data sets.

In MSD's layout the file lists the files of each case. The reader tolerates differences of the ten real tasks (a count
that is off by one, misspelt keys, strings beside dicts, blanks, macOS' ``._`` files). It is strict about errors that
would spoil a training: labels, channels, ids and files. nnU-Net's first version writes the same list, for images stored
as ``CASE_0000.nii.gz``, ``CASE_0001.nii.gz`` ...

nnU-Net's version 2 has ``imagesTr/CASE_0000.nii.gz`` ... and ``labelsTr/CASE.nii.gz``. A data set that nnU-Net 2 can
train on is read in the same way; gaps in label values are allowed too. Errors that would stop nnU-Net in the middle of
its work, or change its training data (an undeclared channel), raise immediately.

References
----------
.. [1] nnU-Net 2.8.1, ``documentation/dataset_format.md``, ``nnunetv2/utilities/utils.py``,
       ``nnunetv2/utilities/label_handling/label_handling.py``.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volseg.data.cases import Case, Task
from volseg.data.layouts.declared import make_task, note_columns, read_channel_names, read_labelled, read_regions
from volseg.data.layouts.files import join_inside, list_images, list_labels, log_once, require_id, sort_cases
from volseg.data.layouts.naming import group_channels, image_of, number_channels
from volseg.data.readers import SUFFIXES, list_files, match_suffix, stem
from volseg.errors import DataError
from volseg.formatting import list_some


def load_msd(manifest: Path, declared: Mapping[str, Any], *, require_files: bool) -> Task:
    """Return the task whose cases ``dataset.json`` lists; see `volseg.data.layouts.load_task`."""
    modalities = read_channel_names(declared, manifest)
    labels = read_regions(declared, manifest)
    columns: dict[str, dict[str, str]] = {}
    found = {
        key: _read_cases(
            declared.get(key, [] if key == "test" else None), key, manifest, len(modalities), labels.labels, columns
        )
        for key in ("training", "test")
    }
    _log_counts(declared, found, manifest, logging.INFO)
    cases = sort_cases(found["training"], found["test"], manifest, require_files=require_files)
    return make_task(manifest, declared, modalities, labels, cases, columns)


def _read_cases(
    entries: Any,
    key: str,
    manifest: Path,
    num_channels: int,
    labels: Mapping[int, str],
    columns: dict[str, dict[str, str]],
) -> list[Case]:
    """Turn the entries (dicts, or bare paths for test cases) into cases; add their further facts to ``columns``."""
    if not isinstance(entries, list):
        raise DataError(f"{manifest}: {key!r} should be a list of cases, got {type(entries).__name__}")
    fields = ("image", "label") if key == "training" else ("image",)
    cases = []
    for index, entry in enumerate(entries):
        files = {"image": entry} if isinstance(entry, str) and key == "test" else entry
        where = f"{manifest}, {key}[{index}]"
        if not isinstance(files, dict) or not all(_are_named(files.get(field), field) for field in fields):
            raise DataError(f"{where} should name {' and '.join(fields)}, got {entry!r}")
        image = _locate_image(files["image"], manifest.parent, where, num_channels)
        if list_files(image)[0].name.startswith("._"):  # macOS adds one for each file of an archive
            continue
        case: Case = {"case": _name_case(files, image, manifest.parent, where), "image": image}
        if "label" in fields:
            case["label"] = join_inside(manifest.parent, files["label"], where)
        if (labelled := read_labelled(files.get("labelled"), labels, where)) is not None:
            case["labelled"] = labelled
        if key == "training":
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
                f"{where} names {len(named)} image files; needed: one for each of {num_channels} channel(s)"
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


def _log_counts(declared: Mapping[str, Any], cases: Mapping[str, Sequence[Case]], manifest: Path, level: int) -> None:
    """Log a wrong numTraining or numTest: the real Task08 is off by one."""
    for key, found in cases.items():
        count = declared.get(f"num{key.capitalize()}", len(found))
        if count != len(found):
            log_once(f"{manifest}: num{key.capitalize()} is {count}, but {len(found)} cases were found", level)


logger = logging.getLogger(__name__)


def load_nnunet(manifest: Path, declared: Mapping[str, Any], *, require_files: bool) -> Task:
    """Return the task of a raw data set; see `volseg.data.layouts.load_task`."""
    folder = manifest.parent
    ending = declared.get("file_ending")  # identifies images; without it any format is allowed
    if ending is not None and (not isinstance(ending, str) or ending.lower() not in SUFFIXES):
        raise DataError(f"{manifest}: 'file_ending' is {ending!r}; needed: one of {', '.join(SUFFIXES)}")
    modalities = read_channel_names(declared, manifest)
    labels = read_regions(declared, manifest)
    columns: dict[str, dict[str, str]] = {}
    if "dataset" in declared:
        training = _read_listed(declared["dataset"], len(modalities), manifest, columns)
    else:
        training = _list_training(folder, ending, modalities)
    test = _list_images(folder / "imagesTs", ending, modalities) if (folder / "imagesTs").is_dir() else {}
    _log_counts(declared, {"training": training}, manifest, logging.WARNING)
    tests = [{"case": require_id(case, str(folder / "imagesTs")), "image": image} for case, image in test.items()]
    cases = sort_cases(training, tests, manifest, require_files=require_files)
    return make_task(manifest, declared, modalities, labels, cases, columns)


def _read_listed(listed: Any, num_channels: int, manifest: Path, columns: dict[str, dict[str, str]]) -> list[Case]:
    """Return the cases that ``dataset`` lists with their files, which may be anywhere, as in nnU-Net."""
    if not isinstance(listed, dict):
        raise DataError(f"{manifest}: 'dataset' should map each case to its files, got {type(listed).__name__}")
    cases = []
    for name, files in listed.items():
        where = f"{manifest}, dataset[{name!r}]"
        images = files.get("images") if isinstance(files, dict) else None
        if not isinstance(images, list) or not all(isinstance(path, str) for path in [*images, files.get("label")]):
            raise DataError(f"{where} should name 'images', a list, and 'label', got {files!r}")
        if len(images) not in {1, num_channels}:
            raise DataError(f"{where} names {len(images)} image(s); needed: one for each of {num_channels} channel(s)")
        note_columns(files, name.strip(), columns)
        # As nnU-Net resolves them: with environment variables, relative to the data set's folder.
        expanded = [manifest.parent / os.path.expandvars(path) for path in (*images, files["label"])]
        *paths, label = (Path(os.path.abspath(path)) for path in expanded)
        cases.append({"case": require_id(name, where), "image": image_of(paths), "label": label})
    return cases


def _list_training(folder: Path, ending: str | None, modalities: Sequence[str]) -> list[Case]:
    images, labels = folder / "imagesTr", folder / "labelsTr"
    for needed in (images, labels):
        if not needed.is_dir():
            raise DataError(f"{folder} has no {needed.name}; nnU-Net's layout needs imagesTr and labelsTr")
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in list_labels(labels):
        if ending is not None and match_suffix(path) and not path.name.endswith(ending):
            continue
        by_name[stem(path)].append(path)
    if doubled := [name for name, paths in by_name.items() if len(paths) > 1]:
        raise DataError(f"{labels} holds {list_some([path.name for path in by_name[doubled[0]]])}; keep one of them")
    found = _list_images(images, ending, modalities)
    if not found:
        raise DataError(f"{images} holds no image; needed: CASE_0000{ending or '.nii.gz'}, a file per channel")
    if alone := sorted(by_name.keys() - found.keys()):
        logger.warning("%s: %d label(s) have no image and are left out: %s", labels, len(alone), list_some(alone))
    return [
        {
            "case": require_id(case, str(images)),
            "image": image,
            "label": by_name[case][0] if case in by_name else labels / f"{case}{ending or '.nii.gz'}",
        }
        for case, image in found.items()
    ]


def _list_images(folder: Path, ending: str | None, modalities: Sequence[str]) -> dict[str, Path | tuple[Path, ...]]:
    """Return the image of each case, by the numbers of channels in the names of files.

    If several channels are declared and every case has only channel 0, its file holds all channels.
    """
    paths = [path for path in list_images(folder) if ending is None or path.name.endswith(ending)]
    numbered = {path: number_channels(stem(path)) for path in paths}
    if unnumbered := [path for path, found in numbered.items() if found is None]:
        raise DataError(
            f"{unnumbered[0]} names no channel; needed: CASE_0000{ending or ''} for the first one, CASE_0001 ..."
        )
    if all(found is not None and found[1] == 0 for found in numbered.values()):
        modalities = ["image"]
    return {case["case"]: case["image"] for case in group_channels(paths, modalities)}
