"""What each image of a DICOM file says of itself: a slice that is a file, or a frame of a file that holds several.

Position, orientation, pixel spacing and rescaling come from the tags of that very slice or frame. An enhanced file
keeps them in functional groups, per frame or shared by all frames; `volseg.data.dicom_stack` compares the images.
Frames without a position of their own are refused, and so is what changes values otherwise than by a line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volseg.data import dicom_tags as tags
from volseg.data.dicom_elements import Header, Item, Tag, parse_numbers
from volseg.data.dicom_pixels import Stored, describe_stored
from volseg.errors import ReaderError

__all__ = ["Frame", "list_frames"]

LARGEST_SKEW = 0.01
"""By how much the length of a direction may differ from 1, and the product of two from 0: rounded cosines."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One image of a file, with its place in the patient (mm, LPS) and the line from stored values to its values."""

    file: Path
    index: int
    """Within its file, from 0."""
    stored: Stored
    position: tuple[float, ...]
    """Centre of the first voxel."""
    orientation: tuple[float, ...]
    """Directions of a row and of a column."""
    spacing: tuple[float, ...]
    """Distance between rows, and between columns."""
    thickness: float | None
    """SpacingBetweenSlices, else SliceThickness, if one of them is given: the extent of a slice without neighbours."""
    slope: float
    intercept: float
    units: Mapping[str, str]
    """What gives positions and values their meaning, by name."""
    states: Mapping[str, str]
    """What may tell it from another image at its place, by name."""

    def __str__(self) -> str:
        return self.file.name if self.stored.frames == 1 else f"{self.file.name} (frame {self.index + 1})"


def list_frames(header: Header) -> list[Frame]:
    """Return the images of a file in the order in which the file holds them.

    Raises
    ------
    ReaderError
        It holds none, or one without a place in the patient, or one whose values are no grey values on a line.
    """
    stored = describe_stored(header)
    described, shared = header.top.items(tags.PER_FRAME), header.top.items(tags.SHARED)
    offsets = _list_dose_offsets(header, stored.frames)
    if not offsets and len(described) != stored.frames and (described or stored.frames > 1):
        raise ReaderError(
            f"{header.path} holds {stored.frames} frames, and its {tags.NAMES[tags.PER_FRAME]} has {len(described)} "
            "items; a volume needs the position of each frame. Convert the file to NIfTI by a tool for its kind"
        )
    return [
        _Said(header, stored, index, (*described[index : index + 1], *shared)).describe(offsets)
        for index in range(stored.frames)
    ]


@dataclass(frozen=True)
class _Said:
    """The elements of one frame: of its own functional groups, of those that frames share, of the top of its file."""

    header: Header
    stored: Stored
    index: int
    groups: tuple[Item, ...]

    def describe(self, offsets: tuple[float, ...]) -> Frame:
        """Return the frame, moved along its normal where its file says so."""
        why = "without it a slice has no place in the patient"
        orientation = self.numbers(tags.ORIENTATION, 6, why)
        position = self.numbers(tags.POSITION, 3, why)
        right, down = np.reshape(orientation, (2, 3))
        lengths = np.linalg.norm((right, down), axis=1)
        if np.abs(lengths - 1).max() > LARGEST_SKEW or abs(right @ down) > LARGEST_SKEW:
            raise ReaderError(
                f"{self} has the ImageOrientationPatient {list(orientation)}; needed: two perpendicular directions of "
                "length 1. Correct the header"
            )
        if offsets:
            position = tuple((position + offsets[self.index] * np.cross(right, down)).tolist())
        spacing = self.numbers(tags.SPACING, 2, self.explain_spacing())
        if min(spacing) <= 0:
            raise ReaderError(f"{self} has the PixelSpacing {list(spacing)} mm; needed: two numbers above 0")
        slope, intercept = self.read_line()
        return Frame(
            file=self.header.path,
            index=self.index,
            stored=self.stored,
            position=position,
            orientation=orientation,
            spacing=spacing,
            thickness=self.read_thickness(),
            slope=slope,
            intercept=intercept,
            units={name: text for tag, name in tags.UNITS.items() if (text := self.format(tag))},
            states={name: text for tag, name in tags.STATES.items() if (text := self.format(tag))},
        )

    def find(self, tag: Tag) -> bytes:
        """Return the bytes of an element; b"" where nothing says it."""
        if (group := tags.GROUPS.get(tag)) is not None:
            for item in self.groups:
                if (found := item.items(group)) and (value := found[0].value(tag)):
                    return value
            if self.groups and tag == tags.POSITION:  # at the top of the file it would be that of every frame
                return b""
        return self.header.top.value(tag)

    def numbers(self, tag: Tag, count: int, why: str) -> tuple[float, ...]:
        """Return the numbers of an element that is needed."""
        found = parse_numbers(self.find(tag))
        if found is None or len(found) != count:
            raise ReaderError(
                f"{self} needs {count} number{'s' * (count > 1)} in DICOM tag ({tag[0]:04x},{tag[1]:04x}), but has "
                f"{self.format(tag)!r}; it is {tags.NAMES[tag]}, {why}"
            )
        return found

    def explain_spacing(self) -> str:
        """Say why a frame without ``PixelSpacing`` is not placed by another element."""
        if self.header.top.value(tags.DETECTOR_SPACING):
            return "and the ImagerPixelSpacing of the file is measured at the detector, not in the patient"
        return "without it a voxel has no size"

    def read_thickness(self) -> float | None:
        """Return the extent of a slice along its normal, if a positive one is given."""
        for tag in (tags.STEP, tags.THICKNESS):
            found = parse_numbers(self.find(tag))
            if found is not None and len(found) == 1 and found[0] > 0:
                return found[0]
        return None

    def read_line(self) -> tuple[float, float]:
        """Return slope and intercept from stored values to values; by default the values are those that are stored."""
        why = "by which stored values become values"
        slope_tag = tags.DOSE_SCALING if self.find(tags.DOSE_SCALING) else tags.SLOPE
        slope = self.numbers(slope_tag, 1, why)[0] if self.find(slope_tag) else 1.0
        intercept = self.numbers(tags.INTERCEPT, 1, why)[0] if self.find(tags.INTERCEPT) else 0.0
        if slope == 0:
            raise ReaderError(f"{self} has a {tags.NAMES[slope_tag]} of 0, which makes all its voxels alike")
        return slope, intercept

    def format(self, tag: Tag) -> str:
        """Return an element as text, cut where it is long."""
        return self.header.top.format(self.find(tag), is_binary=tag in tags.BINARY)[:80]

    def __str__(self) -> str:
        return f"{self.header.path}{f' (frame {self.index + 1})' if self.stored.frames > 1 else ''}"


def _list_dose_offsets(header: Header, frames: int) -> tuple[float, ...]:
    """Return how far each frame of a dose lies from the first one along the normal, in mm; none of what is no dose."""
    value = header.top.value(tags.DOSE_OFFSETS)
    if not value or frames == 1:
        return ()
    offsets = parse_numbers(value)
    if offsets is not None and len(offsets) == frames:
        if offsets[0] == 0:
            return offsets
        position, directions = (parse_numbers(header.top.value(tag)) for tag in (tags.POSITION, tags.ORIENTATION))
        is_upright = directions in ((1, 0, 0, 0, 1, 0), (-1, 0, 0, 0, -1, 0))
        if is_upright and position is not None and offsets[0] == position[-1]:  # heights in the patient
            return tuple(offset - offsets[0] for offset in offsets)
    raise ReaderError(
        f"{header.path} needs {frames} numbers in GridFrameOffsetVector, the first of them 0, or the height of the "
        f"first frame if the dose is upright, but has {header.top.format(value)[:80]!r}; convert the dose to NIfTI"
    )
