"""Find the files that are the channels of one image: by nnU-Net's numbers (``CASE_0000`` ...), or by names."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from volseg.data.cases import Case
from volseg.data.readers import stem
from volseg.errors import DataError
from volseg.formatting import list_duplicates, list_some

__all__ = ["SEPARATORS", "cut_channel", "group_channels", "image_of", "name_image", "number_channels"]

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
            raise DataError(f"{channels[channel]} and {image} are both {both} of {case}; name one of them")
        channels[channel] = image
    return [_gather(case, channels, modalities) for (_, case), channels in groups.items()]


def _parse_channels(images: Sequence[Path], modalities: Sequence[str]) -> list[tuple[str, int]]:
    """Return the case and the channel of each file.

    Numbers count as channels only beside a channel 0: cases may be numbered too.
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
            f"{case} has {len(channels)} file(s), {list_some([path.name for path in channels.values()])}; needed: one "
            f"for each of the {len(modalities)} channels, called {case}_0000, {case}_0001 ... or by "
            f"{', '.join(modalities)}, or one file of all channels, or a table (CSV) that says which is which"
        )
    return {"case": case, "image": tuple(channels[number] for number in range(len(modalities)))}


def name_image(image: Path) -> str:
    """Return the id of a case that is one file, or one folder; the folder "." has a name too."""
    return stem(os.path.abspath(image))
