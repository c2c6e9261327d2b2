"""Read NIfTI-1 and NIfTI-2 files with nibabel.

The header is compared with the file's bytes before nibabel sees them: nibabel would allocate any claimed size. A
compressed file is decompressed to its end, since gzip checks for flipped bits only there. nibabel stops at the last
voxel and silently returns damaged voxels.
"""

import io
import logging
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from volseg.data.volume import (
    as_volume,
    damaged,
    iterate_content,
    naming_damage,
    read_content,
    require_held,
    require_memory,
    require_numbers,
    require_packing,
    require_regular,
)
from volseg.errors import ReaderError

logger = logging.getLogger(__name__)

KINDS = (nibabel.Nifti1Image, nibabel.Nifti2Image)
LONGEST_HEADER = 540
"""Bytes of NIfTI-2's header; NIfTI-1's is shorter."""

LABEL_ROW = re.compile(r'<Label Key="(\d+)"[^>]*><!\[CDATA\[(.*?)\]\]></Label>', re.DOTALL)

FARTHEST_VOXELS = 1 << 26
"""Largest offset of the voxels: extensions of the header precede them."""

MILLIMETRES = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
"""Size of NIfTI's spatial units: unknown (taken as mm), metre, millimetre, micrometre."""


def read_nifti(path: Path) -> MetaTensor:
    """Read a NIfTI file as ``(C, D, H, W)`` float32 with its affine in mm.

    A fourth axis (or a fifth, if the fourth is 1: NIfTI's vectors) becomes the channels. The affine is the sform, else
    the qform. A file with neither is placed only by its spacing, as in nibabel, and a warning is logged.

    Raises
    ------
    ReaderError
        If the file is truncated, damaged or not NIfTI, or has other axes.
    """
    image, content = _parse(path)
    voxels = _read_voxels(image, content, path)
    del content
    return _as_volume(image, voxels, path)


def convert_nifti(image: nibabel.Nifti1Image, path: Path) -> MetaTensor:
    """Return a nibabel image in the form that `read_nifti` returns for its file; messages name ``path``.

    Raises
    ------
    ReaderError
        As `read_nifti`.
    """
    stored = image.dataobj
    is_scaled = nibabel.is_proxy(stored) and (stored.slope, stored.inter) != (1, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        voxels = image.get_fdata(dtype=np.float32, caching="unchanged") if is_scaled else np.asarray(stored)
    return _as_volume(image, voxels, path)


def _as_volume(image: nibabel.Nifti1Image, stored: np.ndarray, path: Path) -> MetaTensor:
    """Return voxels as a volume, with the affine of their header."""
    header = image.header
    sform_code, qform_code = int(header["sform_code"]), int(header["qform_code"])
    if sform_code == qform_code == 0:
        logger.warning("%s has neither sform nor qform; it is placed by its voxel spacing only", path)
    affine, scale = _in_millimetres(image.affine, header)
    voxels = _put_channels_first(stored, path)
    codes = {"sform_code": sform_code, "qform_code": qform_code}
    volume = as_volume(voxels, affine, path, stored=image.get_data_dtype(), **codes)
    if sform_code and qform_code:
        # A prediction keeps both affines: ITK-SNAP and other viewers use the qform.
        with suppress(ValueError, HeaderDataError):  # a damaged quaternion, which the sform overrides
            volume.meta["qform_affine"] = torch.from_numpy(np.diag([scale, scale, scale, 1.0]) @ image.get_qform())
    return volume


def read_nifti_affine(path: Path) -> np.ndarray:
    """Return the affine of a NIfTI file in mm, as `read_nifti` does, but read only the file's first bytes.

    Raises
    ------
    ReaderError
        If the header is truncated, damaged or not NIfTI's.
    """
    require_regular(path)
    with path.open("rb") as file:
        require_packing(file, path, _packing_of(path))
        head = _read_head(file, path)
    kind = _kind_of(head, path)
    _measure(kind, head, path)
    header = kind.header_class(head[: kind.header_class.sizeof_hdr], check=False)
    try:
        return _in_millimetres(header.get_best_affine(), header)[0]
    except (ValueError, HeaderDataError) as fault:
        raise ReaderError(f"{path} is truncated or damaged ({fault}); fetch it again") from fault


def read_label_table(path: Path) -> dict[int, str]:
    """Return the label names in a NIfTI header extension (`volseg.data.labels.format_label_table`); often none.

    Raises
    ------
    ReaderError
        As `read_nifti`.
    """
    extensions = _parse(path)[0].header.extensions
    text = b"".join(extension.content for extension in extensions).decode(errors="replace")
    return {int(value): name for value, name in LABEL_ROW.findall(text)}


def _in_millimetres(affine: np.ndarray, header: nibabel.Nifti1Header) -> tuple[np.ndarray, float]:
    """Return an affine in mm, and the file's unit in mm."""
    scale = MILLIMETRES.get(int(header["xyzt_units"]) & 7, 1.0)
    return np.diag([scale, scale, scale, 1.0]) @ np.array(affine, dtype=np.float64), scale


def _packing_of(path: Path) -> Literal["plain", "gzip"]:
    return "gzip" if path.suffix.lower() == ".gz" else "plain"


def _read_head(file: BinaryIO, path: Path) -> bytes:
    """Return the first bytes of a file, or fewer at its end."""
    head = b""
    with naming_damage(path):
        for piece in iterate_content(file, _packing_of(path)):
            head += piece
            if len(head) >= LONGEST_HEADER:
                break
    if not head:
        raise damaged(path, "it is empty")
    return head[:LONGEST_HEADER]


def _kind_of(head: bytes, path: Path) -> type[nibabel.Nifti1Image]:
    kind = next((kind for kind in KINDS if kind.header_class.may_contain_header(head)), None)
    if kind is None:
        raise ReaderError(
            f"{path} is not a NIfTI file: its header is neither NIfTI-1 nor NIfTI-2; convert it or fetch it again"
        )
    return kind


def _parse(path: Path) -> tuple[nibabel.Nifti1Image, np.ndarray]:
    """Return the image without its voxels, and all bytes of the file."""
    size = require_regular(path)
    packing = _packing_of(path)
    with path.open("rb") as file:
        require_packing(file, path, packing)
        head = _read_head(file, path)
        file.seek(0)
        kind = _kind_of(head, path)
        offset, voxel_bytes = _measure(kind, head, path)
        held = size - offset if packing == "plain" else size
        require_held(voxel_bytes, held, path, packing)
        payload = np.empty(offset + voxel_bytes, dtype=np.uint8)
        read_content(file, path, packing, payload.data, len(payload))
    try:
        return kind.from_stream(io.BytesIO(payload.data[: max(offset, len(head))])), payload
    except (OSError, ValueError, HeaderDataError, ImageFileError) as fault:
        raise damaged(path, fault) from fault


def _measure(kind: type[nibabel.Nifti1Image], head: bytes, path: Path) -> tuple[int, int]:
    """Return offset and size of the voxels from a header, before any allocation."""
    try:
        header = kind.header_class(head[: kind.header_class.sizeof_hdr], check=False)
        stored = header.get_data_dtype()
        shape = tuple(int(side) for side in header.get_data_shape())
        offset = int(header.get_data_offset())
    except (KeyError, ValueError, OverflowError, HeaderDataError) as fault:
        raise damaged(path, fault) from fault
    require_numbers(stored, path)
    if not 3 <= len(shape) <= 5 or min(shape) < 1:
        raise ReaderError(f"{path} has the shape {shape}; needed: three spatial axes and at most one axis of channels")
    if not 0 <= offset <= FARTHEST_VOXELS:
        raise damaged(path, f"its voxels begin at byte {offset}; needed: 0 to {FARTHEST_VOXELS}")
    voxels = math.prod(shape)
    # The file's bytes, once more if they are scaled, and two float32 copies: scaled, and in this package's order.
    require_memory(2 * voxels * stored.itemsize + 8 * voxels, path)
    return offset, voxels * stored.itemsize


def _read_voxels(image: nibabel.Nifti1Image, content: np.ndarray, path: Path) -> np.ndarray:
    try:
        stored = image.dataobj
        if (stored.slope, stored.inter) == (1, 0):  # as stored: `as_volume` converts to float32 while it reorders
            return np.ndarray(stored.shape, stored.dtype, content.data, stored.offset, order="F")
        with np.errstate(over="ignore", invalid="ignore"):
            whole = type(image).from_stream(io.BytesIO(content.data))
            return whole.get_fdata(dtype=np.float32, caching="unchanged")
    except (OSError, EOFError, TypeError, ValueError, OverflowError) as fault:
        raise damaged(path, fault) from fault


def _put_channels_first(voxels: np.ndarray, path: Path) -> np.ndarray:
    """Turn ``(D, H, W)``, ``(D, H, W, C)`` or ``(D, H, W, 1, C)`` into ``(C, D, H, W)``."""
    shape = voxels.shape
    if len(shape) == 5 and 1 in shape[3:]:
        voxels = voxels.reshape(*shape[:3], -1)
    elif len(shape) == 3:
        voxels = voxels[..., None]
    if voxels.ndim != 4:
        raise ReaderError(f"{path} has the shape {shape}; needed: three spatial axes and at most one axis of channels")
    return np.moveaxis(voxels, -1, 0)
