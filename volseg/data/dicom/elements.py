"""Walk through the elements of a DICOM file, and check the length of each against the rest of the file.

GDCM allocates the length that an element claims, up to 4 GiB, before it looks for the bytes. It also reads the geometry
and the rescaling of a whole series, or of all frames of a file, from one place. So this module reads headers, and GDCM
decompresses only pixels. `TAGS` are the elements that volseg reads, by their names in the standard.
"""

import math
import mmap
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from volseg.data.volume import require_regular
from volseg.errors import ReaderError

Tag = tuple[int, int]
"""Group and element."""

UNDEFINED = 0xFFFFFFFF
LONG_LENGTHS = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
"""Value representations with a length of four bytes, after two reserved bytes."""

KINDS = {*LONG_LENGTHS, *b"AE AS AT CS DA DS DT FD FL IS LO LT PN SH SL SS ST TM UI UL US".split()}
ITEM, ITEM_END, SEQUENCE_END = (0xFFFE, 0xE000), (0xFFFE, 0xE00D), (0xFFFE, 0xE0DD)
LAST = (0xFFFF, 0xFFFF)
PIXELS = (0x7FE0, 0x0010)
SYNTAX = (0x0002, 0x0010)
IMPLICIT, BIG_ENDIAN, DEFLATED = "1.2.840.10008.1.2", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"
DEEPEST = 30
NUMBER = re.compile(rb"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Item:
    """The requested elements of a file or of an item of a sequence."""

    elements: dict[Tag, "bytes | list[Item]"] = field(default_factory=dict)

    def value(self, tag: Tag) -> bytes:
        """Return the bytes of an element; b"" if it is absent or a sequence."""
        found = self.elements.get(tag, b"")
        return found if isinstance(found, bytes) else b""

    def items(self, tag: Tag) -> "list[Item]":
        """Return the items of a sequence; none if it is absent."""
        found = self.elements.get(tag, [])
        return found if isinstance(found, list) else []

    def text(self, tag: Tag) -> str:
        """Return an element as text; "" if it is absent or a sequence."""
        return decode_text(self.value(tag))


def decode_text(value: bytes, encoding: str = "latin-1") -> str:
    """Return a value as printable text: control characters become question marks."""
    decoded = value.decode(encoding, errors="replace").strip("\0 ")
    return "".join(letter if letter.isprintable() else "?" for letter in decoded)


def parse_numbers(value: bytes) -> tuple[float, ...] | None:
    """Return the finite numbers of a text, or None if it has other content."""
    parts = [part.strip(b"\0 ") for part in value.split(b"\\")]
    if not all(NUMBER.fullmatch(part) for part in parts):
        return None
    numbers = tuple(float(part) for part in parts)
    return numbers if all(map(math.isfinite, numbers)) else None


class Pixels(NamedTuple):
    """The bytes of ``PixelData`` in a file."""

    begin: int
    end: int
    is_encapsulated: bool
    """Whether the element has no length and its items contain a compressed stream."""


class Header(NamedTuple):
    """Header of a file, before its pixels."""

    path: Path
    syntax: str
    """Transfer syntax."""
    top: Item
    pixels: Pixels | None


def is_dicom(path: Path) -> bool:
    """Return whether a file claims to be DICOM; a data set without preamble does not."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read_header(path: Path, tags: Collection[Tag], *, to_end: bool = True) -> Header | None:
    """Return the elements among ``tags``, including those inside sequences among ``tags``, or None if it is not DICOM.

    The walk covers every element of the file; without ``to_end``, it stops after the last of the tags.

    Raises
    ------
    ReaderError
        If an element is longer than the rest of the file, or occurs twice in one place with two values.
    """
    if require_regular(path) == 0:
        return None
    # Mapped, so that only the elements' heads are read from the disk.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        has_preamble = content[128:132] == b"DICM"
        if not has_preamble and content[:2] not in (b"\x02\x00", b"\x08\x00"):
            return None  # GDCM ignores a file without a preamble that does not begin like a data set
        information = Item()
        begin = 132 if has_preamble else 0
        of_information = _Walk(content, path, is_implicit=False, wanted={SYNTAX})
        has_information = content[begin : begin + 2] == b"\x02\x00"
        while content[begin : begin + 2] == b"\x02\x00":
            begin = of_information.pass_element(begin, len(content), 0, information)
        syntax = information.text(SYNTAX)
        if not syntax and (has_information or content[begin : begin + 2] != b"\x08\x00"):
            raise damaged(path, "it has no TransferSyntaxUID")
        if syntax in (DEFLATED, BIG_ENDIAN):
            raise ReaderError(
                f"{path} is deflated or big-endian DICOM, which is not supported; convert it to another transfer syntax"
            )
        # Some writers declare implicit and write explicit. A bare data set has no file information: it is
        # little-endian, and each element shows whether it is implicit.
        is_implicit = syntax == IMPLICIT and content[begin + 4 : begin + 6] not in KINDS
        walk, top = _Walk(content, path, is_implicit, frozenset(tags)), Item()
        walk.pass_elements(begin, len(content), 0, into=top, last=LAST if to_end else max(tags))
        return Header(path, syntax or IMPLICIT, top, walk.pixels[0] if walk.pixels else None)


def damaged(path: Path, what: str = "") -> ReaderError:
    """Return the error of a file that is not a readable DICOM."""
    reason = f" ({what})" if what else ""
    return ReaderError(f"{path} is not a readable DICOM file; fetch it again or remove it from the series{reason}")


class _Head(NamedTuple):
    """Head of an element, before its value."""

    tag: Tag
    kind: bytes
    """Value representation; b"" if the element has none."""
    value: int
    length: int


@dataclass(frozen=True)
class _Walk:
    """Walk from element to element; each step returns the first byte after the passed part."""

    content: mmap.mmap
    path: Path
    is_implicit: bool
    """Whether elements have no value representation; else only those without a valid one are read as implicit."""
    wanted: Set[Tag] = frozenset()
    """Tags to keep in ``into``."""
    pixels: list[Pixels] = field(default_factory=list)
    """``PixelData`` of the file itself, once it has been passed."""

    def pass_elements(
        self, begin: int, end: int, depth: int, closing: Tag | None = None, into: Item | None = None, last: Tag = LAST
    ) -> int:
        """Pass elements up to ``end``, to their closing tag, or to the first tag greater than ``last``."""
        while begin + 8 <= end:
            tag = self._tag(begin)
            if tag == closing:
                return begin + 8
            if tag == (0, 0) or tag > last:  # (0, 0) is padding
                break
            begin = self.pass_element(begin, end, depth, into)
        return end

    def _read_head(self, begin: int) -> _Head:
        """Return the head of the element that begins at ``begin``."""
        tag, kind = self._tag(begin), self.content[begin + 4 : begin + 6]
        if self.is_implicit or kind not in KINDS:
            return _Head(tag, b"", begin + 8, self._number(begin + 4, 4))
        if kind in LONG_LENGTHS:
            return _Head(tag, kind, begin + 12, self._number(begin + 8, 4))
        return _Head(tag, kind, begin + 8, self._number(begin + 6, 2))

    def pass_element(self, begin: int, end: int, depth: int, into: Item | None = None) -> int:
        """Pass an element with its content; keep it in ``into`` if it is wanted."""
        tag, kind, value, length = self._read_head(begin)
        into = into if tag in self.wanted else None
        if length == UNDEFINED:
            after = self._pass_items(tag, value, end, depth + 1, into)
        else:
            self._require(tag, length, value, end)
            after = value + length
            may_nest = kind in (b"", b"SQ", b"UN") and tag != PIXELS
            if kind == b"SQ" or (may_nest and length >= 8 and self._tag(value) == ITEM):
                self._pass_items(tag, value, after, depth + 1, into)
            elif into is not None:
                self._keep(into, tag, self.content[value:after])
        if tag == PIXELS and depth == 0:
            if self.pixels:
                raise damaged(self.path, "it has PixelData twice")
            self.pixels.append(Pixels(value, after, length == UNDEFINED))
        return after

    def _pass_items(self, owner: Tag, begin: int, end: int, depth: int, into: Item | None = None) -> int:
        if depth > DEEPEST:
            raise damaged(self.path, f"its elements are nested more than {DEEPEST} levels deep")
        items: list[Item] = []
        if into is not None:
            self._keep(into, owner, items)
        while begin + 8 <= end:
            tag, length = self._tag(begin), self._number(begin + 4, 4)
            begin += 8
            if tag == SEQUENCE_END:
                return begin
            item = None if into is None else Item()
            if item is not None:
                items.append(item)
            if tag == ITEM and length == UNDEFINED:
                begin = self.pass_elements(begin, end, depth, ITEM_END, item)
                continue
            self._require(tag, length if tag == ITEM else end, begin, end)
            if owner != PIXELS:
                self.pass_elements(begin, begin + length, depth, into=item)
            begin += length
        return end

    def _keep(self, into: Item, tag: Tag, found: "bytes | list[Item]") -> None:
        if tag in into.elements and (isinstance(found, list) or into.elements[tag] != found):
            raise damaged(self.path, f"element ({tag[0]:04x},{tag[1]:04x}) occurs twice in one place")
        into.elements[tag] = found

    def _tag(self, begin: int) -> Tag:
        return self._number(begin, 2), self._number(begin + 2, 2)

    def _number(self, begin: int, size: int) -> int:
        return int.from_bytes(self.content[begin : begin + size], "little")

    def _require(self, tag: Tag, length: int, begin: int, end: int) -> None:
        if length > end - begin:
            element = f"element ({tag[0]:04x},{tag[1]:04x})"
            raise damaged(self.path, f"{element} claims {length} bytes, but {max(0, end - begin)} are left")


TAGS: Mapping[str, Tag] = {
    "SpecificCharacterSet": (0x0008, 0x0005),
    "ImageType": (0x0008, 0x0008),
    "StudyDate": (0x0008, 0x0020),
    "Modality": (0x0008, 0x0060),
    "SeriesDescription": (0x0008, 0x103E),
    "PatientID": (0x0010, 0x0020),
    "SliceThickness": (0x0018, 0x0050),
    "SpacingBetweenSlices": (0x0018, 0x0088),
    "ImagerPixelSpacing": (0x0018, 0x1164),
    "SeriesInstanceUID": (0x0020, 0x000E),
    "SeriesNumber": (0x0020, 0x0011),
    "ImagePositionPatient": (0x0020, 0x0032),
    "ImageOrientationPatient": (0x0020, 0x0037),
    "FrameOfReferenceUID": (0x0020, 0x0052),
    "SamplesPerPixel": (0x0028, 0x0002),
    "PhotometricInterpretation": (0x0028, 0x0004),
    "NumberOfFrames": (0x0028, 0x0008),
    "Rows": (0x0028, 0x0010),
    "Columns": (0x0028, 0x0011),
    "PixelSpacing": (0x0028, 0x0030),
    "BitsAllocated": (0x0028, 0x0100),
    "BitsStored": (0x0028, 0x0101),
    "HighBit": (0x0028, 0x0102),
    "PixelRepresentation": (0x0028, 0x0103),
    "RescaleIntercept": (0x0028, 0x1052),
    "RescaleSlope": (0x0028, 0x1053),
    "RescaleType": (0x0028, 0x1054),
    "ModalityLUTSequence": (0x0028, 0x3000),
    "Units": (0x0054, 0x1001),
    "SegmentationType": (0x0062, 0x0001),
    "DoseGridScaling": (0x3004, 0x000E),
    "SharedFunctionalGroupsSequence": (0x5200, 0x9229),
    "PerFrameFunctionalGroupsSequence": (0x5200, 0x9230),
}

GROUPS: Mapping[str, Tag] = {
    "ImagePositionPatient": (0x0020, 0x9113),
    "ImageOrientationPatient": (0x0020, 0x9116),
    **dict.fromkeys(("PixelSpacing", "SpacingBetweenSlices", "SliceThickness"), (0x0028, 0x9110)),
    **dict.fromkeys(("RescaleIntercept", "RescaleSlope", "RescaleType"), (0x0028, 0x9145)),
}
"""The functional group, a sequence, of each element in an enhanced file."""

UNITS = ("FrameOfReferenceUID", "Units", "RescaleType")
"""Elements that define the meaning of positions and values; a volume has one value of each."""

OVERLAY_BITS = [(group, 0x0102) for group in range(0x6000, 0x6020, 2)]
"""Tags of the voxel bit of an overlay; 0 if the overlay has separate data."""

WANTED = frozenset({*TAGS.values(), *GROUPS.values(), *OVERLAY_BITS})
"""Every element that is read from a header."""
