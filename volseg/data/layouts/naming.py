"""Name undeclared channels and labels: channels after files, labels after their values."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from volseg.data.case_store.file_digests import list_image_files
from volseg.data.dicom.labels import DicomLabel
from volseg.data.json_files import read_json
from volseg.data.layouts.declared import DeclaredLabels, read_channel_names, read_regions
from volseg.data.layouts.files import log_once
from volseg.data.readers import read_volume
from volseg.data.threads import map_in_threads
from volseg.errors import DataError, ReaderError
from volseg.files import replacing
from volseg.formatting import list_some

__all__ = ["attempt_values", "match_channels", "name_channels", "name_labels"]

logger = logging.getLogger(__name__)

CACHE = Path(".volseg") / "label_values.json"
"""File with the values of a folder's label maps, so that they are read only once."""

MOST_VALUES = 1000
"""Most values of a label map; a volume with more is an image."""


def name_channels(declared: Mapping[str, Any], source: Path) -> tuple[str, ...] | None:
    """Return the channels' names that a manifest declares, or None if it declares none."""
    return read_channel_names(declared, source) if {"channel_names", "modality"} & declared.keys() else None


def match_channels(
    found: Sequence[str], declared: Sequence[str] | None, source: Path
) -> tuple[tuple[str, ...], list[int]]:
    """Return the names of the channels, and the index of each among the found ones.

    One file is one channel, or all declared channels. Of several files, numbered files are the channels in that order;
    other files have the declared names.

    Raises
    ------
    DataError
        If the declared channels differ from the found ones.
    """
    if len(found) == 1:
        return tuple(declared or [name if name and not name.isdigit() else "image" for name in found]), [0]
    if declared is None:
        return tuple(found), list(range(len(found)))
    if len(found) == len(declared):
        folded = [name.casefold() for name in found]
        if sorted(folded) == sorted(name.casefold() for name in declared):
            return tuple(declared), [folded.index(name.casefold()) for name in declared]
        if all(name.isdigit() for name in found):
            return tuple(declared), sorted(range(len(found)), key=lambda place: int(found[place]))
    raise DataError(
        f"{source} declares the channels {', '.join(declared)}, but the files are called {', '.join(found)}; call them "
        "alike, or number the files (0000, 0001 ...)"
    )


def name_labels(
    declared: Mapping[str, Any], source: Path, labels: Sequence[Path], folder: Path, *, require_files: bool
) -> DeclaredLabels:
    """Return labels as declared, or by default the values of all label maps, named ``label_1`` ....

    By default every label map is read, once: the folder keeps the result. If ``require_files`` is off, unreadable files
    are left to the data check, which names every bad case.

    Raises
    ------
    DataError
        If a file cannot be read or is no label map, or no label map has a structure.
    """
    if "labels" in declared:
        return read_regions(declared, source)
    if strange := sorted({"regions", "regions_class_order", "ignore"} & declared.keys()):
        raise DataError(f"{source} declares {strange[0]!r} without 'labels'; name the labels too")
    found = _read_values(labels, folder)
    faults = [fault for fault in found if isinstance(fault, DataError)]
    if faults and require_files:
        raise faults[0]
    values = sorted({0, *(value for values in found if not isinstance(values, DataError) for value in values)})
    if len(values) < 2:
        if faults:
            raise faults[0]
        raise DataError(f"the {len(labels)} label maps of {folder} hold background only; label the structures")
    named = {value: f"label_{value}" if value else "background" for value in values}
    held = list_some([f"{value} ({name})" for value, name in named.items()], 10)
    log_once(
        f"{folder}: no file names the labels; the label maps hold {held}. Name them in {source}: "
        '{"labels": {"background": 0, ...}}'
    )
    return DeclaredLabels(labels=named)


def _read_values(labels: Sequence[Path], folder: Path) -> list[list[int] | DataError]:
    """Return the values of each label map, from the folder's cache if the file is unchanged, or its fault."""
    known = _read_cache(folder / CACHE)
    keys = {path: _identify(path, folder) for path in labels}
    unread = [path for path, key in keys.items() if key not in known]
    if not unread:
        return [known[keys[path]] for path in labels]
    logger.info("%s: reading %d label map(s) for the values that they hold", folder, len(unread))
    read = dict(zip(unread, map_in_threads(attempt_values, unread), strict=True))
    known |= {keys[path]: values for path, values in read.items() if not isinstance(values, DataError)}
    _write_cache(folder / CACHE, known)
    return [read[path] if path in read else known[keys[path]] for path in labels]


def _identify(path: Path, folder: Path) -> str:
    """Return a text that changes with a label map: the names, sizes and modification times of its files."""
    try:
        found = [(file, file.stat()) for file in list_image_files(path)]
    except (OSError, ReaderError):  # reading the file reports it too
        return str(path)
    places = [file.relative_to(folder) if file.is_relative_to(folder) else file for file, _ in found]
    stated = [
        f"{place.as_posix()} {told.st_size} {told.st_mtime_ns}" for place, (_, told) in zip(places, found, strict=True)
    ]
    return " ".join(stated)


def attempt_values(path: Path) -> list[int] | DataError:
    """Return the values of a label map, or the error of a file that is none."""
    try:
        return _load_values(path)
    except DataError as fault:
        return fault


def _load_values(path: Path) -> list[int]:
    if (label := DicomLabel.open(path)) is not None:
        names = {"background": 0, **{name: number for number, name in enumerate(label.names.values(), 1)}}
        raise DataError(
            f"{path} is a {label}, whose names decide the values of labels; declare those to segment in dataset.json: "
            f"{json.dumps({'labels': names})}"
        )
    voxels = read_volume(path).as_tensor()
    values = voxels.unique()
    if not values.isfinite().all() or (values != values.round()).any() or (values < 0).any() or len(voxels) != 1:
        raise DataError(
            f"{path} is no label map: it holds {len(voxels)} channel(s) of {values.min():g} to {values.max():g}; "
            "needed: one, of integers from 0 on"
        )
    if len(values) > MOST_VALUES:
        raise DataError(f"{path} holds {len(values)} values; needed: a label map, with a number for each structure")
    return values.to(torch.int64).tolist()


def _read_cache(file: Path) -> dict[str, list[int]]:
    """Return the cached values; empty if the file is absent or damaged."""
    try:
        return TypeAdapter(dict[str, list[int]]).validate_python(read_json(file), strict=True)
    except (DataError, ValueError):  # absent at first, and rewritten if damaged
        return {}


def _write_cache(file: Path, known: Mapping[str, list[int]]) -> None:
    try:
        with replacing(file) as partial:
            partial.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    except OSError as fault:  # read-only data, which are read again next time
        logger.info("%s cannot be written (%s); the label maps are read each time", file, fault.strerror or fault)
