"""Read a DICOM series: the only series of a folder, or the series of a file.

A series of single-slice files and a file of several frames are read in the same way. Headers become frames
(`volseg.data.dicom.frames`), and frames become a stack (`stack_frames`). Only then are pixels read, and rescaled by the
values of their frame.

Uncompressed pixels are read here. SimpleITK (GDCM) decompresses the others from a temporary file without the other
elements: from the original file, GDCM would rescale all frames in one way, invert MONOCHROME1 and clip values to one
type.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from monai.data import MetaTensor

from volseg.data.dicom.elements import IMPLICIT, SEQUENCE_END, TAGS, Header, Tag
from volseg.data.dicom.frames import Frame, Stored, list_frames
from volseg.data.dicom.series import list_slices, require_header
from volseg.data.itk import lps_to_ras, simpleitk
from volseg.data.volume import as_volume, require_held, require_memory
from volseg.errors import DamagedFileError, ReaderError


def read_dicom_series(path: Path) -> MetaTensor:
    """Read a series as ``(1, D, H, W)`` float32 with its RAS+ affine; D counts columns, H rows, W slices.

    Slices are in the order of their places along the normal of their plane: the cross product of the row and column
    directions. Values are ``RescaleSlope * stored + RescaleIntercept``, with each slice's own values.

    Parameters
    ----------
    path : Path
        A folder with one series, or a file, which represents all files of its series in its folder.

    Raises
    ------
    ReaderError
        If there is no series, there are several, a file is not DICOM, or the slices do not form an even stack.
    """
    headers = [require_header(file) for file in list_slices(path)]
    frames, affine = stack_frames([frame for header in headers for frame in list_frames(header)])
    voxels = _read_voxels(headers, frames)
    # The smallest type for all values.
    is_rescaled = any((frame.slope, frame.intercept) != (1, 0) for frame in frames)
    stored = np.dtype(np.float32) if is_rescaled else np.result_type(*{frame.stored.dtype for frame in frames})
    return as_volume(voxels.transpose(2, 1, 0)[None], affine, path, stored=stored)


def _read_voxels(headers: Sequence[Header], frames: Sequence[Frame]) -> np.ndarray:
    """Return the values ``(slices, rows, columns)`` in the order of ``frames``, float32."""
    places = {(frame.file, frame.index): place for place, frame in enumerate(frames)}
    by_file = {frame.file: frame.stored for frame in frames}
    shape = (len(frames), frames[0].stored.rows, frames[0].stored.columns)
    # The volume twice (as read, and reordered), and the pixels of one file in GDCM's memory.
    largest = max(stored.voxels * stored.allocated // 8 for stored in by_file.values())
    require_memory(8 * math.prod(shape) + 6 * largest, frames[0].file.parent)
    voxels = np.empty(shape, dtype=np.float32)
    for header in headers:
        for index, image in enumerate(read_stored(header, by_file[header.path])):
            place = places[header.path, index]
            slope, intercept = frames[place].slope, frames[place].intercept
            with np.errstate(over="ignore"):  # a value beyond float32 becomes inf, and the data check reports it
                is_stored = (slope, intercept) == (1, 0)
                voxels[place] = image if is_stored else np.multiply(image, slope, dtype=np.float64) + intercept
    return voxels


TOLERANCE = 0.05
"""Largest distance of a slice from its place in an even stack, as a fraction of the distance between slices.

A missing slice moves another one by at least half that distance; rounded positions move it far less.
"""

TURNED, STRETCHED = 1e-3, 5e-4
"""Largest difference of direction cosines, and of PixelSpacing as a fraction, between slices. Both allow for rounding
in a header, and move the end of 500 voxels by at most half a voxel."""

SAME_PLACE = 0.01
"""Distance along the normal, as a fraction of the pixel spacing, up to which two slices share a place."""


def stack_frames(frames: Sequence[Frame]) -> tuple[list[Frame], np.ndarray]:
    """Return the frames in the order of their places along the normal, and their affine, voxel index to RAS+ mm.

    Voxel indices are column, row and place in the order. The tags of each image determine its place. ITK assumes an
    even stack: a missing slice stretches the patient, and slices of a tilted gantry are straightened. This reader
    refuses slices that are not parallel, evenly spaced and of one size; the error describes the difference.

    Parameters
    ----------
    frames : sequence of Frame
        At least one frame, in any order, of one or of several files.

    Raises
    ------
    ReaderError
        If they differ in size, orientation, spacing or units, share a place, or one is missing.
    """
    _require_alike(frames)
    directions = np.reshape(np.median([frame.orientation for frame in frames], axis=0), (2, 3))
    between_rows, between_columns = np.median([frame.spacing for frame in frames], axis=0)
    right, down = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    normal = np.cross(right, down)
    along = np.array([frame.position for frame in frames]) @ normal
    order = sorted(range(len(frames)), key=lambda index: (along[index], frames[index].file, frames[index].index))
    ordered = [frames[index] for index in order]
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = right * between_columns, down * between_rows
    affine[:3, 2] = _measure_step(ordered, along[order], normal)
    affine[:3, 3] = ordered[0].position
    return ordered, lps_to_ras(affine)


def _require_alike(frames: Sequence[Frame]) -> None:
    """Raise unless all frames have one size, orientation, spacing and meaning."""
    folder = frames[0].file.parent
    for name, rows, tolerance in (
        ("size", [(frame.stored.columns, frame.stored.rows) for frame in frames], 0.0),
        ("ImageOrientationPatient", [frame.orientation for frame in frames], TURNED),
        ("PixelSpacing", [frame.spacing for frame in frames], STRETCHED * min(min(frame.spacing) for frame in frames)),
    ):
        values = np.array(rows, dtype=float)
        if np.ptp(values, axis=0).max() > tolerance:
            usual = int(np.abs(values - np.median(values, axis=0)).max(axis=1).argmin())
            odd = int(np.abs(values - values[usual]).max(axis=1).argmax())
            raise ReaderError(
                f"{folder}: {frames[odd]} has the {name} {list(rows[odd])}, but {frames[usual]} has "
                f"{list(rows[usual])}; a volume needs parallel slices of one size and spacing. Remove localizers and "
                "the like, or put the slices of each kind into their own folder"
            )
    for name in sorted({name for frame in frames for name in frame.units}):
        firsts = {frame.units[name]: frame for frame in reversed(frames) if name in frame.units}
        # Some anonymisers write a new FrameOfReferenceUID into each file.
        is_new_each = name == "FrameOfReferenceUID" and 2 < len(firsts) == len({frame.file for frame in frames})
        if len(firsts) > 1 and not is_new_each:
            (one, by_one), (other, by_other) = sorted(firsts.items())[:2]
            raise ReaderError(
                f"{folder}: {by_one} has the {name} {one!r}, but {by_other} has {other!r}; a volume needs one. Put the "
                "slices of each into their own folder, or set the same for all if they are of one scan"
            )


def _measure_step(frames: Sequence[Frame], along: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Return the step (mm, LPS) from a slice to the next one; the frames are in order."""
    if len(frames) == 1:
        if (thickness := frames[0].thickness) is None:
            raise ReaderError(
                f"{frames[0].file} is a single slice without SpacingBetweenSlices and SliceThickness; a volume of one "
                "slice needs one of them. Add it to the header, or name the whole series"
            )
        return normal * thickness
    positions = np.array([frame.position for frame in frames])
    gaps = np.diff(along)
    apart = gaps > SAME_PLACE * min(frames[0].spacing)
    if not apart.all():
        first = int(apart.argmin())
        one, other = frames[first : first + 2]
        raise ReaderError(
            f"{one.file.parent}: {len(frames)} slices are at {apart.sum() + 1} place(s) along their normal, but a "
            f"volume needs one slice per place: {one} is at {list(one.position)} mm, {other} at {list(other.position)} "
            "mm. Put each time, b-value or echo into its own folder, for example with dcm2niix; remove duplicates"
        )
    step: np.ndarray = (positions[-1] - positions[0]) / (len(frames) - 1)
    even = positions[0] + np.arange(len(frames))[:, None] * step
    away = np.linalg.norm(positions - even, axis=1)
    if not away.max() <= TOLERANCE * gaps.mean():
        gaps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        odd = int(np.abs(gaps - np.median(gaps)).argmax())
        raise ReaderError(
            f"{frames[0].file.parent}: the {len(frames)} slices are not evenly spaced: {gaps[odd]:g} mm between "
            f"{frames[odd]} and {frames[odd + 1]}, {np.median(gaps):g} mm elsewhere; a slice is missing, or the slices "
            "are of more than one stack. Add the missing slice, or put each stack into its own folder"
        )
    return step


PLAIN = (IMPLICIT, "1.2.840.10008.1.2.1")
"""Transfer syntaxes without compression."""

SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
UID = "1.2.826.0.1.3680043.2.1125.1"
"""UID of the file for GDCM."""


def read_stored(header: Header, stored: Stored) -> np.ndarray:
    """Return the stored values ``(frames, rows, columns)``.

    Raises
    ------
    DamagedFileError
        If the number of pixels differs from the header, or the pixels cannot be decompressed.
    ReaderError
        If a value uses more bits than the header declares.
    """
    read = (_read_plain if header.syntax in PLAIN else _decompress)(header, stored)
    raw = read.view(f"<u{stored.allocated // 8}")
    spare = stored.allocated - stored.bits
    if spare == 0:
        return raw.view(stored.dtype)
    values = (raw << spare).view(stored.dtype) >> spare
    others = raw.dtype.type(~stored.overlays & (1 << stored.allocated) - 1)
    if not (((values.view(raw.dtype) ^ raw) & others == 0) | ((raw & others) >> stored.bits == 0)).all():
        raise ReaderError(
            f"{header.path} declares values of {stored.bits} bits (BitsStored), but uses more of the "
            f"{stored.allocated} bits of a voxel, and no OverlayBitPosition explains them; convert the series to NIfTI"
        )
    return values


def _read_plain(header: Header, stored: Stored) -> np.ndarray:
    pixels, size = stored.pixels, stored.allocated // 8
    needed = stored.voxels * size
    held = 0 if pixels.is_encapsulated else pixels.end - pixels.begin
    require_held(needed, held, header.path)
    # Padding is shorter than a row or column, or is one of zeros: other values are a row that the header omits.
    shortest, longest = sorted((stored.rows * size, stored.columns * size))
    padding = held - needed
    with header.path.open("rb") as file:
        file.seek(pixels.begin)
        content = file.read(needed + min(padding, longest))
    require_held(needed, len(content), header.path)  # the file may have been truncated since the header was read
    if padding >= max(2, shortest) and (padding > longest or any(content[needed:])):
        raise DamagedFileError(
            f"{header.path} has {held} bytes of pixels, but {stored.frames} frame(s) of {stored.rows} rows of "
            f"{stored.columns} voxels of {stored.allocated} bits need {needed}; the header is damaged, fetch it again"
        )
    read = np.frombuffer(content, f"<u{size}", stored.voxels)
    return read.reshape(stored.frames, stored.rows, stored.columns)


def _decompress(header: Header, stored: Stored) -> np.ndarray:
    """Decompress the pixels with GDCM."""
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
                f"{header.path} is damaged, or compressed in a way that SimpleITK does not support (transfer syntax "
                f"{header.syntax}); fetch it again, or convert the series to Explicit VR Little Endian"
            ) from fault
    shape = (stored.frames, stored.rows, stored.columns)
    if read.size != stored.voxels or read.shape[-2:] != shape[1:] or read.dtype.itemsize * 8 != stored.allocated:
        raise DamagedFileError(
            f"{header.path} decompresses to {read.dtype} {read.shape}, but its header says {stored.dtype} {shape}; "
            "fetch it again"
        )
    return read.reshape(shape)


def _strip(header: Header, stored: Stored) -> bytes:
    """Return a DICOM file with the compressed pixels, and only the elements that decompression needs."""
    with header.path.open("rb") as file:
        file.seek(stored.pixels.begin)
        stream = file.read(stored.pixels.end - stored.pixels.begin)
    end = struct.pack("<HHI", *SEQUENCE_END, 0)
    if not stream.endswith(end):
        raise DamagedFileError(f"{header.path} is truncated: its compressed pixels have no end; fetch it again")

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
