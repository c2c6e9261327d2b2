"""Read MHA, MHD and NRRD files with SimpleITK, after a check of their headers; it is imported at the first such file.

ITK's world axes point to the patient's left and back (LPS), those of this package to the right and front (RAS+). This
module negates the first two rows of affines.

ITK formats its errors into buffers of about a thousand characters, and allocates the claimed sizes: a damaged line
kills the process, a damaged size exhausts its memory. So a header must have short lines of known fields, and the file
must contain all voxels. Unknown content is refused.
"""

import io
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from monai.data import MetaTensor

from volseg.data.volume import (
    Packing,
    as_volume,
    damaged,
    read_content,
    require_held,
    require_memory,
    require_packing,
    require_regular,
)
from volseg.errors import DamagedFileError, ReaderError


@cache
def simpleitk() -> ModuleType:
    """Import SimpleITK without its C++ warnings: their causes raise errors here that name the file.

    The module is kept for the life of the process, like any import.
    """
    import SimpleITK  # large, and needed only for some formats

    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    return SimpleITK


def read_itk(path: Path) -> MetaTensor:
    """Read an MHA, MHD or NRRD file as ``(C, D, H, W)`` float32 with its RAS+ affine.

    The components of vector voxels, or a fourth axis, become the channels.

    Raises
    ------
    ReaderError
        If the file is truncated, damaged or of another format, or has other axes.
    """
    claim = _read_claim(path)
    require_regular(claim.file)
    reader = simpleitk().ImageFileReader()
    reader.SetFileName(str(path))
    # Named, since ITK would otherwise try twenty parsers.
    reader.SetImageIO("NrrdImageIO" if _is_nrrd(path) else "MetaImageIO")
    try:
        reader.ReadImageInformation()
        _require_room(claim, reader, path)
        image = reader.Execute()
    except RuntimeError as fault:
        raise DamagedFileError(
            f"{path} is truncated, damaged or not a {path.suffix} file: SimpleITK cannot read it; fetch it again"
        ) from fault
    voxels = image_voxels(image, path)
    return as_volume(voxels, image_affine(image), path, stored=voxels.dtype)


def image_voxels(image: Any, path: Path) -> np.ndarray:
    """Return the voxels of a SimpleITK image as ``(C, D, H, W)``; D, H, W are its x, y, z."""
    array = simpleitk().GetArrayFromImage(image)  # (..., z, y, x), then the components of a vector voxel
    dimension = image.GetDimension()
    if array.ndim > dimension:
        array = np.moveaxis(array, -1, 0)
    if dimension == 3 and array.ndim == 3:
        array = array[None]
    if array.ndim != 4:
        raise ReaderError(
            f"{path} has the size {image.GetSize()}; needed: three spatial axes and at most one axis of channels"
        )
    return array.transpose(0, 3, 2, 1)


def image_affine(image: Any) -> np.ndarray:
    """Return the map from voxel index to RAS+ position (mm) of a SimpleITK image."""
    dimension = image.GetDimension()
    direction = np.asarray(image.GetDirection()).reshape(dimension, dimension)[:3, :3]
    affine = np.eye(4)
    affine[:3, :3] = direction * np.asarray(image.GetSpacing())[:3]  # a spacing per column
    affine[:3, 3] = image.GetOrigin()[:3]
    return lps_to_ras(affine)


def lps_to_ras(affine: np.ndarray) -> np.ndarray:
    """Convert an affine with LPS world axes to RAS+ world axes."""
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


LONGEST_HEADER = 1 << 20
LONGEST_LINE = 500
"""Most characters of a field and of the file's path; ITK's errors may quote a text twice in a buffer of 1024."""

LONGEST_NAME = 200
LONGEST_NUMBER = 40
MOST_DIMENSIONS = 5

NRRD_FIELD = re.compile(
    "type|dimension|space|sizes|encoding|endian|content|kinds|labels|units|spacings|thicknesses|centers|centerings|"
    "number|datafile|lineskip|byteskip|min|max|oldmin|oldmax|axismins|axismaxs|sampleunits|spacedimension|spaceunits|"
    "spacedirections|spaceorigin|measurementframe"
)
"""Field names without blanks, since some have two spellings. ``block size`` belongs to a refused type."""

NRRD_PACKINGS: Mapping[str, Packing] = {"raw": "plain", "gzip": "gzip", "gz": "gzip"}


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """Place of the voxels that a header describes."""

    file: Path
    begins: int
    """First byte of the data in ``file``."""
    packing: Packing
    skips: int = 0
    """Bytes before the voxels, after decompression."""
    packed_bytes: int | None = None
    """Bytes that ITK decompresses; None: all bytes."""


def resolve_voxel_file(path: Path) -> Path:
    """Return the file with the voxels of a NRRD or MetaImage file: itself, or the file that its header names.

    Raises
    ------
    ReaderError
        If its header is invalid.
    """
    return _read_claim(path).file


def _is_nrrd(path: Path) -> bool:
    return path.suffix.lower() in (".nrrd", ".nhdr")


def _read_claim(path: Path) -> _Claim:
    return _read_nrrd(path) if _is_nrrd(path) else _read_meta(path)


def _read_nrrd(path: Path) -> _Claim:
    lines, ends = _read_lines(path, end=b"")
    if not lines or not re.fullmatch(r"NRRD000[1-6]", lines[0]):
        raise damaged(path, "it does not begin with NRRD0001 to NRRD0006")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if line.startswith("#") or value.startswith("="):
            continue
        key = name.replace(" ", "").lower()
        if not colon or not NRRD_FIELD.fullmatch(key):
            raise damaged(path, f"its header contains the line {line[:40]!r}, which is not an NRRD field")
        _add_field(fields, key, value.strip(), path)
    _require_shape(fields, "dimension", "sizes", path)
    encoding = fields.get("encoding", "").lower()
    if encoding not in NRRD_PACKINGS:
        raise ReaderError(f"{path} has the encoding {encoding!r}; convert it to raw or gzip")
    _read_number(fields, "lineskip", path)
    skips = max(0, _read_number(fields, "byteskip", path))
    data = fields.get("datafile")
    return _Claim(
        file=path if data is None else _locate_data(path, data),
        begins=ends if data is None else 0,
        packing=NRRD_PACKINGS[encoding],
        skips=skips,
    )


def _read_meta(path: Path) -> _Claim:
    lines, ends = _read_lines(path, end=b"ElementDataFile")
    fields: dict[str, str] = {}
    for line in filter(None, map(str.strip, lines)):
        name, sign, value = line.partition("=")
        if not sign or not 1 <= len(key := name.strip()) <= LONGEST_NAME:  # custom fields are allowed
            raise damaged(path, f"its header contains the line {line[:40]!r}, which is not a MetaImage field")
        _add_field(fields, key, value.strip(), path)
    if "ElementDataFile" not in fields:
        raise damaged(path, "its header has no ElementDataFile")
    _require_shape(fields, "NDims", "DimSize", path)
    if (kind := fields.get("ElementType", "").upper()) in ("MET_LONG", "MET_ULONG"):  # ITK reads 4 bytes each
        raise ReaderError(f"{path} has the ElementType {kind}, which may mean 4 or 8 bytes; convert it to MET_INT")
    _read_number(fields, "ElementNumberOfChannels", path, r"[1-9]\d{0,5}", default="1")
    header_size = _read_number(fields, "HeaderSize", path)
    packed_bytes = _read_number(fields, "CompressedDataSize", path, r"\d{1,15}")
    data = fields["ElementDataFile"]
    is_local = data.lower() == "local"
    file = path if is_local else _locate_data(path, data)
    packing: Packing = "zlib" if _is_true(fields, "CompressedData", path) else "plain"
    if not _is_true(fields, "BinaryData", path, default=True):
        raise ReaderError(f"{path} stores its voxels as text; convert it to binary")
    return _Claim(
        file=file, begins=ends if is_local else max(0, header_size), packing=packing, packed_bytes=packed_bytes or None
    )


def _read_lines(path: Path, end: bytes) -> tuple[list[str], int]:
    """Return the lines of a header up to the line that begins with ``end`` (empty for b""), and the data's offset.

    The last line is part of the header, unless it is empty. Without such a line the whole file is the header.
    """
    if len(str(path)) > LONGEST_LINE:
        raise ReaderError(f"{path} has a path of more than {LONGEST_LINE} characters; move the file to a shorter path")
    require_regular(path)
    with path.open("rb") as file:
        require_packing(file, path)
        head = file.read(LONGEST_HEADER)
    lines, begin = [], 0
    while begin < len(head):
        stop = head.find(b"\n", begin)
        raw = head[begin : stop if stop >= 0 else len(head)]
        begin += len(raw) + 1
        line = raw.rstrip(b"\r")
        if not end and not line:
            break
        if len(line) > LONGEST_LINE and not (not end and (line[:1] == b"#" or b":=" in line)):
            raise damaged(path, f"its header has a line of {len(line)} characters; needed: at most {LONGEST_LINE}")
        if re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", line):
            raise damaged(path, f"its header contains characters that are not text, in {line[:20]!r}")
        lines.append(line.decode("latin-1"))
        if end and line.lstrip().startswith(end):
            break
    else:
        if len(head) == LONGEST_HEADER:
            raise damaged(path, f"its header has over {LONGEST_HEADER} bytes")
    return lines, begin


def _add_field(fields: dict[str, str], key: str, value: str, path: Path) -> None:
    if key in fields and key != "Comment":  # ITK's choice among them is undefined
        raise damaged(path, f"its header has the field {key} twice")
    longest = max(map(len, re.findall(r"[-+.\w]+", value) if re.match(r"[-+.\d(]", value) else ()), default=0)
    if longest > LONGEST_NUMBER and key not in ("datafile", "ElementDataFile", "content", "Name", "Comment"):
        raise damaged(path, f"its {key} contains a number of {longest} characters")
    fields[key] = value


def _require_shape(fields: Mapping[str, str], dimension: str, sizes: str, path: Path) -> None:
    """Raise unless there is a size per dimension: ITK has arrays of fixed length."""
    count, shape = fields.get(dimension, ""), fields.get(sizes, "").split()
    if not re.fullmatch(r"\d", count) or not 1 <= int(count) <= MOST_DIMENSIONS:
        raise damaged(path, f"its {dimension} is {count[:40]!r}; needed: 1 to {MOST_DIMENSIONS}")
    if len(shape) != int(count) or not all(re.fullmatch(r"0*[1-9]\d{0,9}", side) for side in shape):
        raise damaged(path, f"its {sizes} are {' '.join(shape)[:60]!r}; needed: {count} positive numbers")


def _read_number(
    fields: Mapping[str, str], key: str, path: Path, pattern: str = r"-1|\d{1,12}", default: str = "0"
) -> int:
    value = fields.get(key, default)
    if not re.fullmatch(pattern, value):
        raise damaged(path, f"its {key} is {value[:40]!r}, which is not a valid number")
    return int(value)


def _is_true(fields: Mapping[str, str], key: str, path: Path, *, default: bool = False) -> bool:
    value = fields.get(key, str(default)).lower()
    if value not in ("true", "false", "1", "0", "t", "f"):
        raise damaged(path, f"its {key} is {value[:40]!r}, neither True nor False")
    return value in ("true", "1", "t")


def _locate_data(path: Path, name: str) -> Path:
    """Return the only data file of a detached header; ITK would pass a pattern for several files to C's printf."""
    if not name or name.upper().split()[0] == "LIST" or "%" in name:
        raise ReaderError(f"{path} spreads its voxels over several files ({name[:40]!r}); convert it into one")
    return path.parent / os.fsdecode(name.encode("latin-1"))


def _require_room(claim: _Claim, header: Any, path: Path) -> None:
    """Raise unless the data are complete and fit into memory; decompressed bytes are counted, not kept.

    ``header`` is an ``ImageFileReader`` of SimpleITK that has read the header.
    """
    held = require_regular(claim.file) - claim.begins
    if claim.packing == "zlib":  # ITK allocates this too
        require_held(claim.packed_bytes or 0, held, claim.file)
        if claim.file == path and claim.packed_bytes is None:  # ITK would silently return uninitialised memory
            raise damaged(path, "its voxels are compressed, but its header has no CompressedDataSize")
    with claim.file.open("rb") as file:
        require_packing(file, claim.file)
    kind = simpleitk().GetPixelIDValueAsString(header.GetPixelIDValue())
    if (bits := re.fullmatch(r"(?:vector of )?(\d+)-bit (?:(?:un)?signed integer|float)", kind)) is None:
        raise ReaderError(f"{path} stores voxels of type {kind!r}; convert them to integers or floats")
    voxels, bytes_each = math.prod(header.GetSize()) * header.GetNumberOfComponents(), int(bits[1]) // 8
    needed = voxels * bytes_each + claim.skips
    require_held(needed, held, claim.file, claim.packing)
    # Once in ITK, once as an array, once as float32.
    require_memory(voxels * (2 * bytes_each + 4), path)
    if claim.packing == "plain":
        return
    with claim.file.open("rb") as file:
        file.seek(claim.begins)
        # The bytes that ITK decompresses: for too small a size it silently returns uninitialised memory.
        packed = file if claim.packed_bytes is None else io.BytesIO(file.read(claim.packed_bytes))
        read_content(packed, claim.file, claim.packing, None, needed)
