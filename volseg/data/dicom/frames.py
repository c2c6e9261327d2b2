"""Describe the images of a DICOM file, its only slice or its frames: the place and the storage of each.

Position, orientation, pixel spacing and rescaling come from the tags of each slice or frame. An enhanced file keeps
them in functional groups, per frame or shared by all frames; `volseg.data.dicom.volumes` compares the images. Frames
without their own position are refused, like values that are not a linear function of the stored values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volseg.data.dicom.elements import (
    GROUPS,
    OVERLAY_BITS,
    TAGS,
    UNITS,
    Header,
    Item,
    Pixels,
    decode_text,
    parse_numbers,
)
from volseg.errors import ReaderError


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Storage of a file's voxels."""

    frames: int
    rows: int
    columns: int
    allocated: int
    """Bits of a voxel: 8, 16 or 32."""
    bits: int
    """Number of the lowest of these bits, which contain the value."""
    is_signed: bool
    overlays: int
    """Mask of the bits that contain overlays, not values."""
    pixels: Pixels
    """Position of the voxels in the file."""

    @property
    def dtype(self) -> np.dtype:
        """The type of a stored value."""
        return np.dtype(f"<{'i' if self.is_signed else 'u'}{self.allocated // 8}")

    @property
    def voxels(self) -> int:
        """Voxels of all frames."""
        return self.frames * self.rows * self.columns


def describe_stored(header: Header) -> Stored:
    """Return the storage of a file's voxels.

    Raises
    ------
    ReaderError
        If the voxels are not integer grey values.
    """
    if header.pixels is None:
        raise ReaderError(
            f"{header.path} has no PixelData: it is not an image, or has float voxels, which volseg does not read; "
            "convert it to NIfTI"
        )
    _require_grey(header)
    representation = _read_count(header, "PixelRepresentation")
    if representation not in (0, 1):
        raise ReaderError(f"{header.path} has the PixelRepresentation {representation}; needed: 0 or 1")
    stored = Stored(
        frames=_count_frames(header),
        rows=_read_count(header, "Rows"),
        columns=_read_count(header, "Columns"),
        allocated=_read_count(header, "BitsAllocated"),
        bits=_read_count(header, "BitsStored"),
        is_signed=bool(representation),
        overlays=_read_overlays(header),
        pixels=header.pixels,
    )
    high_bit = _read_count(header, "HighBit", default=stored.bits - 1)
    if stored.allocated not in (8, 16, 32) or not 0 < stored.bits <= stored.allocated or high_bit != stored.bits - 1:
        raise ReaderError(
            f"{header.path} stores {stored.bits} of {stored.allocated} bits per voxel, up to bit {high_bit}; needed: "
            "the lowest of 8, 16 or 32 bits. Convert the series to NIfTI"
        )
    if stored.voxels == 0:
        raise ReaderError(
            f"{header.path} has {stored.rows} rows of {stored.columns} voxels; it is damaged or not an image"
        )
    return stored


def _require_grey(header: Header) -> None:
    """Raise unless a voxel is one number, scaled only by slope and intercept."""
    top, path = header.top, header.path
    photometric, kind = top.text(TAGS["PhotometricInterpretation"]), top.text(TAGS["SegmentationType"])
    samples = _read_count(header, "SamplesPerPixel", default=1)
    faults = {
        "is a Siemens mosaic: one image with the slices of a volume as tiles. Convert the series to NIfTI, for example "
        "with dcm2niix": "MOSAIC" in top.text(TAGS["ImageType"]).split("\\"),
        f"contains {photometric or 'values of an unknown kind'} with {samples} sample(s) per pixel; needed: one grey "
        "value, brighter if higher (PhotometricInterpretation MONOCHROME2). Convert the series, or leave it out": (
            samples != 1 or photometric != "MONOCHROME2"
        ),
        "maps its stored values with a table (ModalityLUTSequence), which is not supported; convert the series with a "
        "program that applies the table": bool(top.elements.get(TAGS["ModalityLUTSequence"])),
        "is a dose (DoseGridScaling), not an image; convert it to NIfTI": bool(top.value(TAGS["DoseGridScaling"])),
        f"is a {kind} DICOM segmentation; convert it to a label map, for example in NIfTI": kind
        in ("BINARY", "FRACTIONAL"),
    }
    for fault, is_found in faults.items():
        if is_found:
            raise ReaderError(f"{path} {fault}")


def _read_count(header: Header, keyword: str, default: int | None = None) -> int:
    """Return an element of two bytes as a number."""
    tag = TAGS[keyword]
    value = header.top.value(tag)
    if not value and default is not None:
        return default
    if len(value) != 2:
        raise ReaderError(
            f"{header.path} needs a number of two bytes in DICOM tag ({tag[0]:04x},{tag[1]:04x}), {keyword}, "
            f"but has {value[:8]!r}; it is damaged or not an image"
        )
    return int.from_bytes(value, "little")


def _read_overlays(header: Header) -> int:
    values = (header.top.value(tag) for tag in OVERLAY_BITS)
    positions = {int.from_bytes(value, "little") for value in values if len(value) == 2}
    return sum(1 << position for position in positions if position)


def _count_frames(header: Header) -> int:
    text = header.top.text(TAGS["NumberOfFrames"]) or "1"
    if not re.fullmatch(r"\+?0*[1-9]\d{0,8}", text):
        raise ReaderError(f"{header.path} has the NumberOfFrames {text[:40]!r}; needed: a positive number")
    return int(text)


LARGEST_SKEW = 0.01
"""Largest difference of a direction's length from 1, and of two directions' product from 0, which allows rounding."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One image of a file: its place in the patient (mm, LPS), and the scale of its stored values."""

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
    """SpacingBetweenSlices, else SliceThickness, if given: the extent of a slice without neighbours."""
    slope: float
    intercept: float
    units: Mapping[str, str]
    """Elements that define the meaning of positions and values, by keyword."""

    def __str__(self) -> str:
        return self.file.name if self.stored.frames == 1 else f"{self.file.name} (frame {self.index + 1})"


def list_frames(header: Header) -> list[Frame]:
    """Return the images of a file, in the file's order.

    Raises
    ------
    ReaderError
        If there is no image, an image has no place in the patient, or its values are not linear grey values.
    """
    stored = describe_stored(header)
    described, shared = (header.top.items(TAGS[f"{kind}FunctionalGroupsSequence"]) for kind in ("PerFrame", "Shared"))
    if len(described) != stored.frames and (described or stored.frames > 1):
        raise ReaderError(
            f"{header.path} has {stored.frames} frames, but its PerFrameFunctionalGroupsSequence has {len(described)} "
            "items; a volume needs the position of each frame. Convert the file to NIfTI with a tool for its kind"
        )
    return [
        _Elements(header, stored, index, (*described[index : index + 1], *shared)).describe()
        for index in range(stored.frames)
    ]


@dataclass(frozen=True)
class _Elements:
    """The elements of a frame: from its own functional groups, from shared groups, and from the top of its file."""

    header: Header
    stored: Stored
    index: int
    groups: tuple[Item, ...]

    def describe(self) -> Frame:
        """Return the frame."""
        why = "without it a slice has no place in the patient"
        orientation = self.numbers("ImageOrientationPatient", 6, why)
        position = self.numbers("ImagePositionPatient", 3, why)
        right, down = np.reshape(orientation, (2, 3))
        lengths = np.linalg.norm((right, down), axis=1)
        if np.abs(lengths - 1).max() > LARGEST_SKEW or abs(right @ down) > LARGEST_SKEW:
            raise ReaderError(
                f"{self} has the ImageOrientationPatient {list(orientation)}; needed: two perpendicular directions of "
                "length 1. Correct the header"
            )
        at_detector = "and the file's ImagerPixelSpacing is measured at the detector, not in the patient"
        why = at_detector if self.find("ImagerPixelSpacing") else "without it a voxel has no size"
        spacing = self.numbers("PixelSpacing", 2, why)
        if min(spacing) <= 0:
            raise ReaderError(f"{self} has the PixelSpacing {list(spacing)} mm; needed: two positive numbers")
        slope = self.scale("RescaleSlope", 1.0)
        if slope == 0:
            raise ReaderError(f"{self} has a RescaleSlope of 0, so all voxels would be equal; correct it")
        return Frame(
            file=self.header.path,
            index=self.index,
            stored=self.stored,
            position=position,
            orientation=orientation,
            spacing=spacing,
            thickness=self.parse_slice_thickness(),
            slope=slope,
            intercept=self.scale("RescaleIntercept", 0.0),
            units={keyword: text for keyword in UNITS if (text := self.format(keyword))},
        )

    def find(self, keyword: str) -> bytes:
        """Return the bytes of an element; b"" if it is absent."""
        tag = TAGS[keyword]
        if (group := GROUPS.get(keyword)) is not None:
            for item in self.groups:
                if (found := item.items(group)) and (value := found[0].value(tag)):
                    return value
            if self.groups and keyword == "ImagePositionPatient":  # the file's own position would apply to every frame
                return b""
        return self.header.top.value(tag)

    def numbers(self, keyword: str, count: int, why: str) -> tuple[float, ...]:
        """Return the numbers of a required element."""
        found = parse_numbers(self.find(keyword))
        if found is None or len(found) != count:
            group, element = TAGS[keyword]
            raise ReaderError(
                f"{self} needs {count} number{'s' * (count > 1)} in DICOM tag ({group:04x},{element:04x}), but has "
                f"{self.format(keyword)!r}; it is {keyword}, {why}"
            )
        return found

    def scale(self, keyword: str, default: float) -> float:
        """Return a number that scales stored values."""
        return self.numbers(keyword, 1, "which scales the stored values")[0] if self.find(keyword) else default

    def parse_slice_thickness(self) -> float | None:
        """Return the extent of a slice along its normal, if the header has a positive one."""
        for keyword in ("SpacingBetweenSlices", "SliceThickness"):
            found = parse_numbers(self.find(keyword))
            if found is not None and len(found) == 1 and found[0] > 0:
                return found[0]
        return None

    def format(self, keyword: str) -> str:
        """Return an element as text, cut to 80 characters."""
        return decode_text(self.find(keyword))[:80]

    def __str__(self) -> str:
        return f"{self.header.path}{f' (frame {self.index + 1})' if self.stored.frames > 1 else ''}"
