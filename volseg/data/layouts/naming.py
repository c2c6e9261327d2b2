"""Find the files that are the channels of one image, and name channels and labels.

Channels are found by nnU-Net's numbers (``CASE_0000`` ...), or by names. Undeclared channels are named after their
files, undeclared labels after their values.
"""

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from volseg.data.case_store.cache_folder import FileMemory, list_image_files
from volseg.data.cases import Case
from volseg.data.dicom.labels import DicomLabel
from volseg.data.layouts.declared import DeclaredLabels, read_channel_names, read_regions
from volseg.data.readers import read_volume, stem
from volseg.data.threads import map_in_threads
from volseg.errors import DataError
from volseg.files import choose_cache_folder
from volseg.formatting import list_duplicates, list_some
from volseg.launched import read_launch

logger = logging.getLogger(__name__)


@cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line about a data set once per job: a command that plans and trains reads the data set several times."""
    if (launch := read_launch()) is None or launch.rank == 0:
        logger.log(level, "%s", line)


CHANNEL_NUMBER = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")

ALL_CHANNELS = -1
"""Channel number of a file with all channels."""

SEPARATORS = "_-."
"""Separators between a case's id and the word for the kind of file."""


def number_channels(name: str) -> tuple[str, int] | None:
    """Return the case and the channel number in a file's stem, or None if it has none.

    >>> number_channels("BRATS_001_0003")
    ('BRATS_001', 3)
    """
    match = CHANNEL_NUMBER.fullmatch(name)
    return None if match is None else (match["case"], int(match["channel"]))


def image_of(files: Sequence[Path]) -> Path | tuple[Path, ...]:
    """Return the image of a case: a path, or a tuple of one path per channel."""
    return files[0] if len(files) == 1 else tuple(files)


def group_channels(images: Sequence[Path], modalities: Sequence[str]) -> list[Case]:
    """Return a case per image; its channels may be in separate files.

    With one channel, each file is an image. Case names omit nnU-Net's ``_0000`` if all files end in it, and the name of
    the channel, as in ``CASE_t1``, unless two cases would then have the same name. With several channels, a file holds
    all of them unless its name ends in the number or the name of one.

    Raises
    ------
    DataError
        If an image has only some channels, or has one twice.
    """
    if len(modalities) == 1:
        numbered = [number_channels(stem(image)) for image in images]
        if not all(found is not None and found[1] == 0 for found in numbered):
            numbered = [cut_channel(name_image(image), modalities) for image in images]
        pairs = zip(images, numbered, strict=True)
        names = [found[0] if found and found[0] else name_image(image) for image, found in pairs]
        doubled = set(list_duplicates(names))
        return [
            {"case": name_image(image) if name in doubled else name, "image": image}
            for name, image in zip(names, images, strict=True)
        ]
    groups: dict[tuple[Path, str], dict[int, Path]] = defaultdict(dict)
    for image, (case, channel) in zip(images, _parse_channels(images, modalities), strict=True):
        channels = groups[image.parent, case]
        if channel in channels:
            both = "all channels" if channel == ALL_CHANNELS else f"channel {channel}"
            raise DataError(f"{channels[channel]} and {image} are both {both} of {case}; name only one of them")
        channels[channel] = image
    return [_gather(case, channels, modalities) for (_, case), channels in groups.items()]


def _parse_channels(images: Sequence[Path], modalities: Sequence[str]) -> list[tuple[str, int]]:
    """Return the case and the channel of each file.

    Numbers count as channels only if there is a channel 0: cases may be numbered too.
    """
    first = {(image.parent, found[0]) for image in images if (found := number_channels(stem(image))) and not found[1]}
    return [
        found
        if (found := number_channels(stem(image))) is not None and (image.parent, found[0]) in first
        else _parse_named(image, modalities) or (name_image(image), ALL_CHANNELS)
        for image in images
    ]


def _parse_named(image: Path, modalities: Sequence[str]) -> tuple[str, int] | None:
    """Return the case and the channel of a file whose name ends in the name of a channel, or is one."""
    found = cut_channel(stem(image), modalities)
    return found if found is None or found[0] else (Path(os.path.abspath(image)).parent.name, found[1])


def cut_channel(name: str, modalities: Sequence[str]) -> tuple[str, int] | None:
    """Return the part of a file's stem before the name of a channel at its end, and the channel.

    >>> cut_channel("pat13_T1", ["flair", "t1"]), cut_channel("t1", ["t1"]), cut_channel("pat13", ["t1"])
    (('pat13', 1), ('', 0), None)
    """
    for channel in sorted(range(len(modalities)), key=lambda channel: -len(modalities[channel])):
        ending = modalities[channel].casefold()
        if name.casefold() == ending:
            return "", channel
        case = name[: -len(ending) - 1]
        if case and name.casefold() in {f"{case.casefold()}{mark}{ending}" for mark in SEPARATORS}:
            return case, channel
    return None


def _gather(case: str, channels: Mapping[int, Path], modalities: Sequence[str]) -> Case:
    if ALL_CHANNELS in channels and len(channels) == 1:
        return {"case": case, "image": channels[ALL_CHANNELS]}
    if sorted(channels) != list(range(len(modalities))):
        raise DataError(
            f"{case} has {len(channels)} file(s): {list_some([path.name for path in channels.values()])}; needed: one "
            f"for each of the {len(modalities)} channels, called {case}_0000, {case}_0001 ... or ending in "
            f"{', '.join(modalities)}; or one file with all channels, or a table (CSV) with a column per channel"
        )
    return {"case": case, "image": tuple(channels[number] for number in range(len(modalities)))}


def name_image(image: Path) -> str:
    """Return the id of a case from its file or folder; the id of "." is the folder's real name."""
    return stem(os.path.abspath(image))


MOST_VALUES = 1000
"""Most values of a label map; a volume with more is an image."""


def name_channels(declared: Mapping[str, Any], source: Path) -> tuple[str, ...] | None:
    """Return the names of the channels that a manifest declares, or None if it declares none."""
    return read_channel_names(declared, source) if {"channel_names", "modality"} & declared.keys() else None


def match_channels(
    found: Sequence[str], declared: Sequence[str] | None, source: Path
) -> tuple[tuple[str, ...], list[int]]:
    """Return the names of the channels, and the index of each among the found ones.

    One file is one channel, or all declared channels. Several files that are numbered without a gap are the channels in
    that order; other files have the declared names.

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
            order = sorted(range(len(found)), key=lambda place: int(found[place]))
            begin = int(found[order[0]])
            is_complete = [int(found[place]) for place in order] == [*range(begin, begin + len(found))]
            if is_complete and begin <= (len(found[0]) != 4):  # four digits are nnU-Net's, and begin at 0000
                return tuple(declared), order
    raise DataError(
        f"{source} declares the channels {', '.join(declared)}, but the images have {', '.join(found)}; use the "
        "same names, or number the channels of the images (0000, 0001 ...)"
    )


def name_labels(
    declared: Mapping[str, Any], source: Path, labels: Sequence[Path], folder: Path, *, require_files: bool
) -> DeclaredLabels:
    """Return the declared labels, or without them the values of all label maps, named ``label_1`` ....

    Without declared labels every label map is read once; the cache folder stores the result. If ``require_files`` is
    off, unreadable files are left to the data check, which names every bad case.

    Raises
    ------
    DataError
        If a file cannot be read or is not a label map, or no label map has a structure.
    """
    if "labels" in declared:
        return read_regions(declared, source)
    if strange := sorted({"regions", "regions_class_order", "ignore"} & declared.keys()):
        raise DataError(f"{source} declares {strange[0]!r} without 'labels'; declare 'labels' too")
    found = _read_values(labels, folder)
    faults = [fault for fault in found if isinstance(fault, DataError)]
    if faults and require_files:
        raise faults[0]
    values = sorted({0, *(value for values in found if not isinstance(values, DataError) for value in values)})
    if len(values) < 2:
        if faults:
            raise faults[0]
        raise DataError(f"the {len(labels)} label maps of {folder} contain only background; label the structures")
    named = {value: f"label_{value}" if value else "background" for value in values}
    held = list_some([f"{value} ({name})" for value, name in named.items()], 10)
    log_once(
        f"{folder}: no file names the labels; the label maps contain {held}. Name them in {source}: "
        '{"labels": {"background": 0, ...}}'
    )
    return DeclaredLabels(labels=named)


def _read_values(labels: Sequence[Path], folder: Path) -> list[list[int] | DataError]:
    """Return the values of each label map, from the cache folder if the file is unchanged, or its fault."""
    cache = choose_cache_folder("auto")
    memory = FileMemory(None if cache is None else cache / "files")

    def load(path: Path) -> list[int]:
        log_once(f"{folder}: reading the label maps to find their values")
        return _load_values(path)

    def read(path: Path) -> list[int] | DataError:
        try:
            return memory.recall("label values", list_image_files(path), partial(load, path))
        except DataError as fault:
            return fault
        except OSError:
            return attempt_values(path)  # its reader reports the fault

    return list(map_in_threads(read, labels))


def attempt_values(path: Path) -> list[int] | DataError:
    """Return the values of a label map, or the error of a file that is not one."""
    try:
        return _load_values(path)
    except DataError as fault:
        return fault


def _load_values(path: Path) -> list[int]:
    if (label := DicomLabel.open(path)) is not None:
        names = {"background": 0, **{name: number for number, name in enumerate(label.names.values(), 1)}}
        raise DataError(
            f"{path} is a {label}, which is matched to labels by name; declare the labels to segment in dataset.json: "
            f"{json.dumps({'labels': names})}"
        )
    voxels = read_volume(path).as_tensor()
    values = voxels.unique()
    if not values.isfinite().all() or (values != values.round()).any() or (values < 0).any() or len(voxels) != 1:
        raise DataError(
            f"{path} is not a label map: it has {len(voxels)} channel(s) with values from {values.min():g} to "
            f"{values.max():g}; needed: one channel of non-negative integers"
        )
    if len(values) > MOST_VALUES:
        raise DataError(f"{path} has {len(values)} values; needed: a label map, with one integer per structure")
    return values.to(torch.int64).tolist()
