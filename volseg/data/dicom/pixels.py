"""Read the stored values of a DICOM file, without rescaling or geometry.

Uncompressed pixels are read here. SimpleITK (GDCM) gets a compressed stream in a file of its own, without the other
elements: from the whole file, GDCM would rescale all frames in one way, invert MONOCHROME1 and clip values to one type.
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from volseg.data.content import require_held
from volseg.data.dicom.elements import BIG_ENDIAN, IMPLICIT, OVERLAY_BITS, SEQUENCE_END, TAGS, Header, Pixels, Tag
from volseg.data.itk import simpleitk
from volseg.errors import DamagedFileError, ReaderError

PLAIN = (IMPLICIT, "1.2.840.10008.1.2.1", BIG_ENDIAN)
"""Transfer syntaxes without compression."""

SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
UID = "1.2.826.0.1.3680043.2.1125.1"
"""UID of the file for GDCM."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Storage of a file's voxels."""

    frames: int
    rows: int
    columns: int
    allocated: int
    """Bits of a voxel: 8, 16 or 32."""
    bits: int
    """Number of the lowest of these bits, which hold the value."""
    is_signed: bool
    overlays: int
    """Mask of the bits that hold overlays, not values."""
    pixels: Pixels
    """Their place in the file."""

    @property
    def dtype(self) -> np.dtype:
        """The type of a stored value, in the byte order of this machine."""
        return np.dtype(f"{'i' if self.is_signed else 'u'}{self.allocated // 8}")

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
            f"{header.path} holds no PixelData: it is no image, or one of floats, which is not read; "
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
            "the lowest bits of 8, 16 or 32. Convert the series to NIfTI"
        )
    if stored.voxels == 0:
        raise ReaderError(
            f"{header.path} has {stored.rows} rows of {stored.columns} voxels; it is damaged, or no image"
        )
    return stored


def _require_grey(header: Header) -> None:
    """Raise unless a voxel is one number, and slope and intercept give its value."""
    top, path = header.top, header.path
    photometric, kind = top.text(TAGS["PhotometricInterpretation"]), top.text(TAGS["SegmentationType"])
    samples = _read_count(header, "SamplesPerPixel", default=1)
    faults = {
        "is a Siemens mosaic: one image, whose tiles are the slices of a volume. Convert the series to NIfTI, for "
        "example by dcm2niix": "MOSAIC" in top.text(TAGS["ImageType"]).split("\\"),
        "is MONOCHROME1: low values are bright, and some programs invert them while others do not. Convert the series "
        "to MONOCHROME2": photometric == "MONOCHROME1",
        "has no PhotometricInterpretation; if its values are grey, add MONOCHROME2": not photometric,
        f"holds {photometric} with {samples} sample(s) per pixel; a volume needs grey values (MONOCHROME2). Leave it "
        "out, or convert its colours to numbers": samples != 1 or photometric != "MONOCHROME2",
        "maps its stored values by a table (ModalityLUTSequence), which is not read; convert the series by a program "
        "that applies the table": bool(top.elements.get(TAGS["ModalityLUTSequence"])),
        f"is a {kind} DICOM segmentation; convert it to a label map, for example in NIfTI": kind
        in ("BINARY", "FRACTIONAL"),
    }
    for fault, is_found in faults.items():
        if is_found:
            raise ReaderError(f"{path} {fault}")


def read_stored(header: Header, stored: Stored) -> np.ndarray:
    """Return the stored values ``(frames, rows, columns)``.

    Raises
    ------
    DamagedFileError
        If the number of pixels differs from the header, or the pixels cannot be decompressed.
    ReaderError
        If a value takes more bits than the header declares.
    """
    read = (_read_plain if header.syntax in PLAIN else _decompress)(header, stored)
    raw = read.view(f"u{stored.allocated // 8}")
    spare = stored.allocated - stored.bits
    if spare == 0:
        return raw.view(stored.dtype)
    values = (raw << spare).view(stored.dtype) >> spare
    others = raw.dtype.type(~stored.overlays & (1 << stored.allocated) - 1)
    if not (((values.view(raw.dtype) ^ raw) & others == 0) | ((raw & others) >> stored.bits == 0)).all():
        raise ReaderError(
            f"{header.path} says that values take {stored.bits} bits (BitsStored), but uses more of the "
            f"{stored.allocated} bits of a voxel, and no OverlayBitPosition explains them; convert the series to NIfTI"
        )
    return values


def _read_plain(header: Header, stored: Stored) -> np.ndarray:
    pixels, size = stored.pixels, stored.allocated // 8
    needed = stored.voxels * size
    held = 0 if pixels.is_encapsulated else pixels.end - pixels.begin
    require_held(needed, held, header.path)
    # Padding is shorter than a row or column, or one of these with zeros: other values are a row that the header omits.
    shortest, longest = sorted((stored.rows * size, stored.columns * size))
    padding = held - needed
    with header.path.open("rb") as file:
        file.seek(pixels.begin)
        content = file.read(needed + min(padding, longest))
    require_held(needed, len(content), header.path)  # the file may have been truncated since the header was read
    if padding >= max(2, shortest) and (padding > longest or any(content[needed:])):
        raise DamagedFileError(
            f"{header.path} holds {held} bytes of pixels, and {stored.frames} frame(s) of {stored.rows} rows of "
            f"{stored.columns} voxels of {stored.allocated} bits take {needed}; the header is damaged, fetch it again"
        )
    order = ">" if header.top.order == "big" else "<"
    if size == 1 and order == ">" and pixels.kind == b"OW":  # two voxels make a word
        content = np.frombuffer(content, ">u2").astype("<u2").tobytes()
    read = np.frombuffer(content, f"{order}u{size}", stored.voxels).astype(f"u{size}", copy=False)
    return read.reshape(stored.frames, stored.rows, stored.columns)


def _decompress(header: Header, stored: Stored) -> np.ndarray:
    """Decompress the pixels by GDCM."""
    if not stored.pixels.is_encapsulated:
        raise ReaderError(
            f"{header.path} has the transfer syntax {header.syntax}, but no compressed pixels; convert the series to "
            "Explicit VR Little Endian"
        )
    with TemporaryDirectory() as folder:
        file = Path(folder, "pixels.dcm")
        file.write_bytes(_strip(header, stored))
        itk = simpleitk()
        try:
            read: np.ndarray = itk.GetArrayFromImage(itk.ReadImage(str(file), imageIO="GDCMImageIO"))
        except RuntimeError as fault:
            raise DamagedFileError(
                f"{header.path} is damaged, or compressed in a way that SimpleITK does not know (transfer syntax "
                f"{header.syntax}); fetch it again, or convert the series to Explicit VR Little Endian"
            ) from fault
    shape = (stored.frames, stored.rows, stored.columns)
    if read.size != stored.voxels or read.shape[-2:] != shape[1:] or read.dtype.itemsize * 8 != stored.allocated:
        raise DamagedFileError(
            f"{header.path} decompresses to {read.dtype} {read.shape}, and its header says {stored.dtype} {shape}; "
            "fetch it again"
        )
    return read.reshape(shape)


def _strip(header: Header, stored: Stored) -> bytes:
    """Return a DICOM file with the compressed pixels, and only the elements for their decompression."""
    with header.path.open("rb") as file:
        file.seek(stored.pixels.begin)
        stream = file.read(stored.pixels.end - stored.pixels.begin)
    end = struct.pack("<HHI", *SEQUENCE_END, 0)
    if not stream.endswith(end):
        raise DamagedFileError(f"{header.path} is truncated: its compressed pixels do not end; fetch it again")

    def element(tag: Tag, kind: bytes, value: bytes) -> bytes:
        value += (b" " if kind != b"UI" else b"\0") * (len(value) % 2)
        return struct.pack("<HH2sH", *tag, kind, len(value)) + value

    capture, uid = SECONDARY_CAPTURE.encode(), UID.encode()
    named = {0x0002: capture, 0x0003: uid, 0x0010: header.syntax.encode("latin-1")}
    information = b"".join(element((0x0002, tag), b"UI", value) for tag, value in named.items())
    numbers = {
        "Rows": stored.rows,
        "Columns": stored.columns,
        "BitsAllocated": stored.allocated,
        "BitsStored": stored.bits,
        "HighBit": stored.bits - 1,
        "PixelRepresentation": int(stored.is_signed),
    }
    body = (
        element((0x0008, 0x0016), b"UI", capture)
        + element((0x0008, 0x0018), b"UI", uid)
        + element(TAGS["SamplesPerPixel"], b"US", struct.pack("<H", 1))
        + element(TAGS["PhotometricInterpretation"], b"CS", b"MONOCHROME2")
        + element(TAGS["NumberOfFrames"], b"IS", str(stored.frames).encode())
        + b"".join(element(TAGS[keyword], b"US", struct.pack("<H", value)) for keyword, value in numbers.items())
        + struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF)
    )
    length = element((0x0002, 0x0000), b"UL", struct.pack("<I", len(information)))
    return bytes(128) + b"DICM" + length + information + body + stream


def _read_count(header: Header, keyword: str, default: int | None = None) -> int:
    """Return a number of two bytes."""
    tag = TAGS[keyword]
    value = header.top.value(tag)
    if not value and default is not None:
        return default
    if len(value) != 2:
        raise ReaderError(
            f"{header.path} needs a number of two bytes in DICOM tag ({tag[0]:04x},{tag[1]:04x}), {keyword}, "
            f"but has {value[:8]!r}; it is damaged, or no image"
        )
    return int.from_bytes(value, header.top.order)


def _read_overlays(header: Header) -> int:
    values = (header.top.value(tag) for tag in OVERLAY_BITS)
    positions = {int.from_bytes(value, header.top.order) for value in values if len(value) == 2}
    return sum(1 << position for position in positions if position)


def _count_frames(header: Header) -> int:
    text = header.top.text(TAGS["NumberOfFrames"]) or "1"
    if not re.fullmatch(r"\+?0*[1-9]\d{0,8}", text):
        raise ReaderError(f"{header.path} has the NumberOfFrames {text[:40]!r}; needed: a number from 1 on")
    return int(text)
