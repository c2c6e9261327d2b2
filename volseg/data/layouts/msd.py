"""Tasks of the Medical Segmentation Decathlon: ``dataset.json`` lists the files of each case.

The reader tolerates differences of the ten real tasks (a count that is off by one, misspelt keys, strings beside dicts,
blanks, macOS' ``._`` files). It is strict about errors that would spoil a training: labels, channels, ids and files.
nnU-Net's first version writes the same list, for images stored as ``CASE_0000.nii.gz``, ``CASE_0001.nii.gz`` ...
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volseg.data.cases import Case, Task
from volseg.data.layouts.channels import image_of, number_channels
from volseg.data.layouts.declared import (
    make_task,
    note_columns,
    read_channel_names,
    read_labelled,
    read_regions,
)
from volseg.data.layouts.files import join_inside, log_once, require_id, sort_cases
from volseg.data.readers import list_files, stem
from volseg.errors import DataError

__all__ = ["load_msd"]


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
    _log_counts(declared, manifest=manifest, **found)
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


def _log_counts(declared: Mapping[str, Any], *, manifest: Path, **cases: Sequence[Case]) -> None:
    """Log a wrong numTraining or numTest: the real Task08 is off by one."""
    for key, found in cases.items():
        count = declared.get(f"num{key.capitalize()}", len(found))
        if count != len(found):
            log_once(f"{manifest}: num{key.capitalize()} is {count}, but {len(found)} cases are listed")
