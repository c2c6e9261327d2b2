"""Walk through the elements of a DICOM file and compare the length of each with what is left of the file.

GDCM allocates the length that an element claims, up to 4 GiB, before it looks for the bytes. It also says nothing of
files that are no images, such as structure sets and reports, whose elements are read here as well.
"""

import mmap
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from volseg.data.content import require_regular
from volseg.errors import ReaderError

__all__ = ["Tag", "is_dicom", "read_elements", "read_transfer_syntax", "require_sound_elements"]

Tag = tuple[int, int]
"""Group and element."""

UNDEFINED = 0xFFFFFFFF
LONG_LENGTHS = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
"""Value representations whose length has four bytes, after two that are reserved."""

KINDS = {*LONG_LENGTHS, *b"AE AS AT CS DA DS DT FD FL IS LO LT PN SH SL SS ST TM UI UL US".split()}
ITEM, ITEM_END, SEQUENCE_END = (0xFFFE, 0xE000), (0xFFFE, 0xE00D), (0xFFFE, 0xE0DD)
PIXELS = (0x7FE0, 0x0010)
IMPLICIT, BIG_ENDIAN, DEFLATED = "1.2.840.10008.1.2", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"
DEEPEST = 30


def read_transfer_syntax(content: bytes) -> str:
    """Return how a file says that it is encoded; "" for one without preamble."""
    found = re.search(rb"\x02\x00\x10\x00UI(..)", content[132:4096], re.DOTALL)
    if content[128:132] != b"DICM" or found is None:
        return ""
    begin = 132 + found.end()
    return content[begin : begin + int.from_bytes(found[1], "little")].decode("latin-1").strip("\0 ")


def is_dicom(path: Path) -> bool:
    """Return whether a file says that it is DICOM; a data set without preamble does not."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def require_sound_elements(path: Path) -> str:
    """Raise unless every element lies in its file; return the transfer syntax, "" for a file that is no DICOM.

    Raises
    ------
    ReaderError
        Names the element.
    """
    with _opened(path) as begun:
        if begun is None:
            return ""
        begun.walk.pass_elements(begun.begin, len(begun.walk.content), 0)
        return begun.syntax


def read_elements(path: Path, tags: Collection[Tag]) -> dict[Tag, bytes] | None:
    """Return the values of those ``tags`` that a file has, outside of sequences; None for a file that is no DICOM.

    Nothing behind the last of them is looked at.

    Raises
    ------
    ReaderError
        An element before it is longer than the file.
    """
    with _opened(path) as begun:
        if begun is None:
            return None
        walk, begin, end = begun.walk, begun.begin, len(begun.walk.content)
        found: dict[Tag, bytes] = {}
        while begin + 8 <= end and (0, 0) < (head := walk.read_head(begin)).tag <= max(tags):
            begin = walk.pass_element(begin, end, 0)
            if head.tag in tags:
                found[head.tag] = walk.content[head.value : begin]
        return found


class _Opened(NamedTuple):
    """A file before its first element."""

    walk: "_Walk"
    begin: int
    syntax: str


@contextmanager
def _opened(path: Path) -> Iterator[_Opened | None]:
    """Give the elements of a file behind its file information; None for a file that is no DICOM."""
    if require_regular(path) == 0:
        yield None
        return
    # Mapped, so that only the elements' heads are read from the disk.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        has_preamble = content[128:132] == b"DICM"
        if not has_preamble and content[:2] not in (b"\x02\x00", b"\x08\x00"):
            yield None  # what neither says that it is DICOM nor begins as a data set does, GDCM leaves alone
            return
        syntax = read_transfer_syntax(content[:4096]) or IMPLICIT
        if syntax == DEFLATED:
            raise ReaderError(f"{path} is deflated DICOM, which is not read; convert it to another transfer syntax")
        begin, walk = 132 if has_preamble else 0, _Walk(content, path, "little", is_implicit=False)
        while content[begin : begin + 2] == b"\x02\x00":
            begin = walk.pass_element(begin, len(content), 0)
        order: Literal["little", "big"] = "big" if syntax == BIG_ENDIAN else "little"
        yield _Opened(_Walk(content, path, order, is_implicit=has_preamble and syntax == IMPLICIT), begin, syntax)


class _Head(NamedTuple):
    """What stands before an element's value."""

    tag: Tag
    kind: bytes
    """Value representation; b"" where the element names none."""
    value: int
    length: int


@dataclass(frozen=True)
class _Walk:
    """Steps from element to element; each returns the byte after what it passed."""

    content: mmap.mmap
    path: Path
    order: Literal["little", "big"]
    is_implicit: bool
    """Whether no element names its value representation; else those that name none are taken for such."""

    def pass_elements(self, begin: int, end: int, depth: int, closing: Tag | None = None) -> int:
        """Pass elements up to ``end``, or to the tag that closes them."""
        while begin + 8 <= end:
            tag = self._tag(begin)
            if tag == closing:
                return begin + 8
            if tag == (0, 0):  # padding
                break
            begin = self.pass_element(begin, end, depth)
        return end

    def read_head(self, begin: int) -> _Head:
        """Return tag, kind, and where the value begins and how long it claims to be."""
        tag, kind = self._tag(begin), self.content[begin + 4 : begin + 6]
        if self.is_implicit or kind not in KINDS:
            return _Head(tag, b"", begin + 8, self._number(begin + 4, 4))
        if kind in LONG_LENGTHS:
            return _Head(tag, kind, begin + 12, self._number(begin + 8, 4))
        return _Head(tag, kind, begin + 8, self._number(begin + 6, 2))

    def pass_element(self, begin: int, end: int, depth: int) -> int:
        """Pass an element with everything in it."""
        tag, kind, value, length = self.read_head(begin)
        if length == UNDEFINED:
            return self._pass_items(tag, value, end, depth + 1)
        self._require(tag, length, value, end)
        may_nest = kind in (b"", b"SQ", b"UN") and tag != PIXELS
        if kind == b"SQ" or (may_nest and length >= 8 and self._tag(value) == ITEM):
            self._pass_items(tag, value, value + length, depth + 1)
        return value + length

    def _pass_items(self, owner: Tag, begin: int, end: int, depth: int) -> int:
        if depth > DEEPEST:
            raise self._damaged(f"its elements are nested over {DEEPEST} deep")
        while begin + 8 <= end:
            tag, length = self._tag(begin), self._number(begin + 4, 4)
            begin += 8
            if tag == SEQUENCE_END:
                return begin
            if tag == ITEM and length == UNDEFINED:
                begin = self.pass_elements(begin, end, depth, ITEM_END)
                continue
            self._require(tag, length if tag == ITEM else end, begin, end)
            if owner != PIXELS:
                self.pass_elements(begin, begin + length, depth)
            begin += length
        return end

    def _tag(self, begin: int) -> Tag:
        return self._number(begin, 2), self._number(begin + 2, 2)

    def _number(self, begin: int, size: int) -> int:
        return int.from_bytes(self.content[begin : begin + size], self.order)

    def _require(self, tag: Tag, length: int, begin: int, end: int) -> None:
        if length > end - begin:
            element = f"element ({tag[0]:04x},{tag[1]:04x})"
            raise self._damaged(f"{element} claims {length} bytes, {max(0, end - begin)} are left")

    def _damaged(self, what: str) -> ReaderError:
        return ReaderError(
            f"{self.path} is no readable DICOM file; fetch it again or take it out of the series ({what})"
        )
