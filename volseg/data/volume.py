"""The content of a file: its bytes, with checks of the sizes that its header claims, and its voxels with their place.

A header can claim any size in a few digits. The claim is compared with the file's bytes before memory of that size is
allocated, and a compressed file is decompressed no further than its header needs.

Every reader returns a MetaTensor of MONAI, so its transforms can be used and inverted. Beside MONAI's own keys,
``meta`` has the values that a writer needs to save a prediction in the form of the image's file.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from isal import igzip_lib, isal_zlib
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
WINDOW_BITS = {"gzip": 31, "zlib": 15}
"""Window bits of the two containers of deflate, with a check of the container's checksum."""

GZIP = b"\x1f\x8b"
LFS_POINTER = b"version https://git-lfs"
"""First bytes of gzip files and of Git LFS pointers."""

NIFTI = tuple(size.to_bytes(4, order) for size in (348, 540) for order in ("little", "big"))
"""First bytes of NIfTI-1 and NIfTI-2: the size of the header."""

GZIP_FLAGS, RESERVED_FLAGS = 3, 0xE0
"""Index of the flags in a gzip member, and its reserved flags, which ISA-L does not check."""


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
        raise ReaderError(f"{path} cannot be looked at ({fault.strerror or fault}); check the path") from fault
    if not stat.S_ISREG(found.st_mode):
        raise ReaderError(f"{path} is no regular file (or a link to something else); name a file that holds an image")
    return found.st_size


def require_packing(file: BinaryIO, path: Path, packing: Packing | None = None) -> None:
    """Raise if a file is a pointer of Git LFS, or its compression differs from its name.

    Parameters
    ----------
    file : binary file
        Open at its beginning, and left there.
    path : Path
        Path of the file, for messages.
    packing : {"plain", "gzip"}, optional
        Compression by the name of a NIfTI file; None for other formats.
    """
    begin = file.read(len(LFS_POINTER))
    file.seek(0)
    if begin == LFS_POINTER:
        raise ReaderError(
            f"{path} is a pointer of Git LFS, a text that stands for the image; fetch the image by `git lfs pull`"
        )
    if packing == "plain" and begin.startswith(GZIP):
        raise ReaderError(f"{path} is compressed by gzip, which its name does not say; rename it to {path.name}.gz")
    if packing == "gzip" and begin.startswith(NIFTI):
        raise ReaderError(
            f"{path} is not compressed by gzip, as its name says; rename it to {path.name.removesuffix(path.suffix)}"
        )


def require_held(claimed: int, held: int, path: Path, packing: Packing = "plain") -> None:
    """Raise if ``held`` bytes of a file cannot hold the ``claimed`` bytes at any compression."""
    most = max(held, 0) * (1 if packing == "plain" else DEFLATE_RATIO)
    if claimed > most:
        at_most = "" if packing == "plain" else " at most"
        raise DamagedFileError(
            f"{path} is truncated or damaged (Expected {claimed} bytes, got {most}{at_most}); fetch it again"
        )


def require_memory(needed: int, path: Path) -> None:
    """Raise if a volume would take more bytes than the free memory."""
    if needed > ALWAYS_FITS and needed > (free := available_bytes()):
        raise LargeVolumeError(
            f"{path} needs {needed / 2**30:.1f} GiB of memory to be read, and {free / 2**30:.1f} GiB are free; crop or "
            "resample it, or read it on a larger machine"
        )


class Content:
    """Content of a file, decompressed, from a position on; read from front to back, only as far as requested.

    Parameters
    ----------
    file : binary file
        Open at the beginning of the content.
    path : Path
        Path of the file, for messages.
    packing : {"plain", "gzip", "zlib"}
        Compression of the content.
    """

    def __init__(self, file: BinaryIO, path: Path, packing: Packing) -> None:
        self._path = path
        self._pieces = _read_pieces(file) if packing == "plain" else _inflate(file, packing)
        self._ahead = b""

    def peek(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or fewer at the end, without advancing."""
        while len(self._ahead) < count and (piece := self._next()):
            self._ahead += piece
        return self._ahead[:count]

    def fill(self, room: memoryview) -> int:
        """Write the next bytes into ``room`` until it is full or the content ends; return their number."""
        piece, filled = self._ahead or self._next(), 0
        self._ahead = b""
        while piece:
            end = min(len(piece), len(room) - filled)
            room[filled : filled + end] = piece[:end]
            filled += end
            if filled == len(room):
                self._ahead = piece[end:]
                break
            piece = self._next()
        return filled

    def count(self, most: int) -> int:
        """Read up to ``most`` bytes without keeping them; return their number."""
        counted = len(self._ahead)
        self._ahead = b""
        while counted < most and (piece := self._next()):
            counted += len(piece)
        return counted

    def finish(self) -> None:
        """Read to the end, which has the checksum.

        Raises
        ------
        ReaderError
            If the file is damaged, or has more than `SURPLUS_BYTES` left.
        """
        if self.count(SURPLUS_BYTES + 1) > SURPLUS_BYTES:
            raise DamagedFileError(
                f"{self._path} holds more than its header says, or its header is damaged (over {SURPLUS_BYTES} bytes "
                "follow the voxels); fetch it again"
            )

    def _next(self) -> bytes:
        try:
            return next(self._pieces, b"")
        except DAMAGED as fault:
            reason = "CRC check failed" if "Incorrect checksum" in str(fault) else str(fault)
            raise DamagedFileError(f"{self._path} is truncated or damaged ({reason}); fetch it again") from fault


def _read_pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def _inflate(file: BinaryIO, packing: Packing) -> Iterator[bytes]:
    """Yield the content of consecutive streams, a piece at a time; zeros between gzip's members are padding."""
    packed = file.read(PIECE)
    while True:
        while len(packed) <= GZIP_FLAGS and (more := file.read(PIECE)):
            packed += more
        if packing == "gzip" and len(packed) > GZIP_FLAGS and packed[GZIP_FLAGS] & RESERVED_FLAGS:
            raise OSError("a gzip member sets flags that are reserved")
        engine = isal_zlib.decompressobj(WINDOW_BITS[packing])
        while not engine.eof:
            piece = engine.decompress(packed, PIECE)
            packed = engine.unconsumed_tail
            if piece:
                yield piece
            elif not engine.eof and not packed and not (packed := file.read(PIECE)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        packed = engine.unused_data
        if packing == "zlib":
            return
        while not (packed := packed.lstrip(b"\0")):
            if not (packed := file.read(PIECE)):
                return


SCANNER_ANATOMICAL = 1
"""NIfTI's ``NIFTI_XFORM_SCANNER_ANAT``: a position in the scanner, as in DICOM, MHA and NRRD."""

BLOCK_SIDE = 32
"""Voxels along two axes that are reordered together."""


def require_numbers(stored: np.dtype, path: str | Path) -> None:
    """Raise unless voxels of type ``stored`` are integers or floats of 64 bits at most: no colours, complex numbers."""
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
    """Bind voxels to their place in the patient.

    Parameters
    ----------
    voxels
        ``(C, D, H, W)`` in the order of the file's own voxel axes.
    affine
        4 x 4, voxel index (i, j, k) to RAS+ position (mm).
    stored
        The voxel type of the file.
    sform_code, qform_code
        NIfTI's codes for the meaning of the affine; a file of another format counts as scanner coordinates.

    Raises
    ------
    ReaderError
        If the voxels are no numbers, there are none, or the affine does not place them in three dimensions.
    """
    require_numbers(stored, path)
    if voxels.ndim != 4 or 0 in voxels.shape:
        raise ReaderError(
            f"{path} needs three axes with at least one voxel each, but has (C, D, H, W) = {voxels.shape}"
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

    Files have their first axis contiguous. A block of it fits into the cache; line by line the whole volume would pass
    through the cache once per voxel of a line, which takes three times as long for a CT.
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
