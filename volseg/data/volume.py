"""Read the bytes of a file, check the sizes that its header claims, and return voxels with their place in the patient.

A header can claim any size in a few digits. The claim is compared with the file's bytes before memory of that size is
allocated, and a compressed file is decompressed no further than its header needs.

Every reader returns a MetaTensor, so MONAI's transforms can be used and inverted. In addition to MONAI's own keys,
``meta`` has the values that a writer needs to save a prediction in the form of the image's file.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from isal import igzip, igzip_lib, isal_zlib
from monai.data import MetaTensor
from monai.utils import SpaceKeys

from volseg.errors import DamagedFileError, LargeVolumeError, ReaderError
from volseg.memory import available_bytes
from volseg.transforms.slabs import run_over_slabs

SURPLUS_BYTES = 4096
"""Bytes that may follow the voxels: padding to a block. More bytes mean a wrong header, or a bomb."""

DEFLATE_RATIO = 1032
"""Bytes that one byte of a deflate stream can become at most (zlib's technical notes)."""

ALWAYS_FITS = 1 << 26
"""Bytes that need no check of the free memory: the check takes as long as reading a small volume."""

PIECE = 1 << 18
"""Bytes read or decompressed at a time."""

DAMAGED: tuple[Any, ...] = (OSError, EOFError, igzip_lib.IsalError)
"""Errors of reading; the library's type stubs mistake its error class for an instance."""

Packing = Literal["plain", "gzip", "zlib"]

GZIP = b"\x1f\x8b"
LFS_POINTER = b"version https://git-lfs"
"""First bytes of gzip files and of Git LFS pointers."""

NIFTI = tuple(size.to_bytes(4, order) for size in (348, 540) for order in ("little", "big"))
"""First bytes of NIfTI-1 and NIfTI-2: the size of the header."""

GZIP_FLAGS, RESERVED_FLAGS = 3, 0xE0
"""Index of the flags in a gzip member, and its reserved flags, which ISA-L does not check."""


def damaged(path: Path, what: object) -> DamagedFileError:
    """Return the error of a file whose bytes have changed since it was written."""
    return DamagedFileError(f"{path} is truncated or damaged ({what}); fetch it again")


def require_regular(path: Path) -> int:
    """Return the size of a regular file, links followed; other kinds may block or never end.

    Raises
    ------
    ReaderError
        For a pipe, a socket, a device, or a path that cannot be read.
    """
    try:
        found = os.stat(path)
    except OSError as fault:
        raise ReaderError(f"{path} cannot be accessed ({fault.strerror or fault}); check the path") from fault
    if not stat.S_ISREG(found.st_mode):
        raise ReaderError(f"{path} is neither a regular file nor a link to one; name an image file")
    return found.st_size


def require_packing(file: BinaryIO, path: Path, packing: Packing | None = None) -> None:
    """Raise if a file is a Git LFS pointer, or its compression does not match its name.

    Parameters
    ----------
    file : binary file
        File open at its beginning, where it stays.
    path : Path
        Path of the file, for messages.
    packing : {"plain", "gzip"}, optional
        Compression by the name of a NIfTI file; None for other formats.
    """
    begin = file.read(len(LFS_POINTER))
    file.seek(0)
    if begin == LFS_POINTER:
        raise ReaderError(
            f"{path} is a Git LFS pointer, a text in place of the image; fetch the image with `git lfs pull`"
        )
    if packing == "plain" and begin.startswith(GZIP):
        raise ReaderError(f"{path} is compressed with gzip, but not called .gz; rename it to {path.name}.gz")
    if begin.startswith(GZIP) and len(begin) > GZIP_FLAGS and begin[GZIP_FLAGS] & RESERVED_FLAGS:
        raise damaged(path, "its gzip header has reserved flags")
    if packing == "gzip" and begin.startswith(NIFTI):
        raise ReaderError(
            f"{path} is called .gz, but not compressed with gzip; rename it to {path.name.removesuffix(path.suffix)}"
        )


def require_held(claimed: int, held: int, path: Path, packing: Packing = "plain") -> None:
    """Raise if ``held`` bytes of a file cannot contain the ``claimed`` bytes at any compression."""
    most = max(held, 0) * (1 if packing == "plain" else DEFLATE_RATIO)
    if claimed > most:
        at_most = "" if packing == "plain" else " at most"
        raise damaged(path, f"Expected {claimed} bytes, got {most}{at_most}")


def require_memory(needed: int, path: Path) -> None:
    """Raise if a volume would take more bytes than the free memory."""
    if needed > ALWAYS_FITS and needed > (free := available_bytes()):
        raise LargeVolumeError(
            f"{path} needs {needed / 2**30:.1f} GiB of memory, but {free / 2**30:.1f} GiB are free; crop or resample "
            "it, or read it on a larger machine"
        )


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn errors of reading into a `DamagedFileError` with the path."""
    try:
        yield
    except DAMAGED as fault:
        raise damaged(path, fault) from fault


def iterate_content(file: BinaryIO, packing: Packing) -> Iterator[bytes]:
    """Yield the decompressed content of a file from its position on, a piece at a time."""
    if packing != "zlib":
        content: Any = igzip.IGzipFile(fileobj=file, mode="rb") if packing == "gzip" else file
        while piece := content.read1(PIECE):
            yield piece
        return
    engine = isal_zlib.decompressobj()
    while not engine.eof:
        if not (packed := engine.unconsumed_tail or file.read(PIECE)):
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        yield engine.decompress(packed, PIECE)


def read_content(file: BinaryIO, path: Path, packing: Packing, room: memoryview | None, needed: int) -> None:
    """Read the content to its end, where the checksum is; write its first ``needed`` bytes into ``room``.

    Raises
    ------
    DamagedFileError
        If the file is damaged, has fewer bytes, or has more than `SURPLUS_BYTES` after them.
    """
    count = 0
    with naming_damage(path):
        for piece in iterate_content(file, packing):
            if room is not None:
                room[count : count + len(piece)] = piece[: max(0, needed - count)]
            count += len(piece)
            if count > needed + SURPLUS_BYTES:
                break
    require_held(needed, count, path)
    if count > needed + SURPLUS_BYTES:
        raise damaged(path, f"it contains more than its header says: over {SURPLUS_BYTES} bytes follow the voxels")


SCANNER_ANATOMICAL = 1
"""NIfTI's ``NIFTI_XFORM_SCANNER_ANAT``: a position in the scanner, as in DICOM, MHA and NRRD."""

BLOCK_SIDE = 32
"""Voxels along two axes that are reordered together."""


def require_numbers(stored: np.dtype, path: str | Path) -> None:
    """Raise unless ``stored`` is a type of integers or floats of at most 64 bits, not of colours or complex numbers."""
    if stored.kind not in "biuf" or stored.itemsize > 8:
        raise ReaderError(f"{path} stores voxels of type {stored}; convert them to integers or floats")


def as_volume(
    voxels: np.ndarray,
    affine: np.ndarray,
    path: str | Path,
    *,
    stored: np.dtype,
    sform_code: int = SCANNER_ANATOMICAL,
    qform_code: int = SCANNER_ANATOMICAL,
) -> MetaTensor:
    """Return voxels as a volume with their place in the patient.

    Parameters
    ----------
    voxels
        ``(C, D, H, W)`` in the order of the file's own voxel axes.
    affine
        4 x 4, voxel index (i, j, k) to RAS+ position (mm).
    stored
        The voxel type of the file.
    sform_code, qform_code
        NIfTI's codes for the meaning of the affine; for other formats, scanner coordinates.

    Raises
    ------
    ReaderError
        If there are no voxels, they are not numbers, or the affine does not place them in three dimensions.
    """
    require_numbers(stored, path)
    if voxels.ndim != 4 or 0 in voxels.shape:
        raise ReaderError(
            f"{path} must have three axes with at least one voxel each, but has (C, D, H, W) = {voxels.shape}"
        )
    affine = np.asarray(affine, dtype=np.float64)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        raise ReaderError(
            f"{path} has the affine {affine[:3].tolist()}, which does not place voxels in three dimensions; "
            "correct the header (spacing and direction)"
        )
    data = torch.from_numpy(_order_voxels(voxels))
    meta = {
        "filename_or_obj": str(path),
        "original_affine": torch.from_numpy(affine.copy()),
        "spatial_shape": tuple(voxels.shape[1:]),
        "original_dtype": stored.name,
        "sform_code": sform_code,
        "qform_code": qform_code,
        "space": SpaceKeys.RAS,
    }
    return MetaTensor(data, affine=torch.from_numpy(affine), meta=meta)


def _order_voxels(voxels: np.ndarray) -> np.ndarray:
    """Return a copy in float32 whose last axis is contiguous.

    Files have their first axis contiguous. A block of voxels fits into the cache; line by line, the whole volume would
    pass through the cache once per voxel of a line, which takes three times as long for a CT.
    """
    ordered = np.empty(voxels.shape, dtype=np.float32)

    def order(planes: slice) -> None:
        # A value beyond float32 becomes inf here, and the data check reports it with its file.
        with np.errstate(over="ignore", invalid="ignore"):
            for h in range(0, voxels.shape[2], BLOCK_SIDE):
                block = (slice(None), planes, slice(h, h + BLOCK_SIDE))
                ordered[block] = voxels[block]

    run_over_slabs(order, voxels.shape[1:], BLOCK_SIDE)
    return ordered
