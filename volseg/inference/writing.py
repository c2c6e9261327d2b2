"""Write a label map as NIfTI on the grid of the image that it labels, whatever format the image had."""

import io
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from isal import igzip_threaded
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import LARGEST_VALUE
from volseg.errors import DataError, GridError
from volseg.files import replacing
from volseg.inference.nifti_header import place
from volseg.transforms.grid import Grid
from volseg.transforms.slabs import run_over_slabs

__all__ = ["build_label_image", "write_prediction"]

COMPRESSION = 2
"""ISA-L's level: a label map takes a quarter more than by zlib's level 6, in a thirtieth of the time."""

COMPRESSED_TOGETHER = 2**20
"""Bytes that one thread compresses at a time: the file's bytes follow from it, not from the number of threads."""

MOST_THREADS = 4
"""Beyond them putting the voxels in order takes longer."""

BLOCK_SIDE = 64
"""Voxels along two axes that are put in the file's order together."""


def write_prediction(label_map: Tensor, reference: MetaTensor, path: str | os.PathLike[str]) -> Path:
    """Write ``label_map`` as NIfTI with the affine and the header codes of its image; return the path.

    Voxels are uint8, or uint16 or int32 where the largest value needs it. The file replaces an older one in one step or
    not at all. Equal label maps give equal bytes.

    Parameters
    ----------
    label_map : Tensor
        ``(1, D, H, W)`` or ``(D, H, W)``, whole numbers in [0, 16777215].
    reference : MetaTensor
        The image, as read or preprocessed: its original grid is meant. Its ``meta`` holds ``sform_code``,
        ``qform_code`` and ``qform_affine`` as the readers set them; without them the affine counts as the scanner's.
    path : path
        Ends in ``.nii`` or ``.nii.gz``.

    Raises
    ------
    DataError
        If the path has another suffix or the label map holds other values.
    GridError
        If the label map has another shape than the reference.
    """
    path = Path(path)
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise DataError(f"a prediction is written as NIfTI: {path} must end in .nii or .nii.gz")
    image = build_label_image(label_map, reference, path)
    content = io.BytesIO()
    image.to_stream(content)
    if path.name.lower().endswith(".gz"):
        content = _compress(content.getbuffer())
    with replacing(path) as partial:
        partial.write_bytes(content.getbuffer())
    return path


def build_label_image(label_map: Tensor, reference: MetaTensor, path: Path) -> nib.Nifti1Image:
    """Return the image that `write_prediction` writes; ``path`` names it in messages."""
    grid = Grid.original(reference)
    voxels = torch.as_tensor(label_map).detach().cpu()
    if voxels.shape not in (grid.shape, (1, *grid.shape)):
        raise GridError(
            f"{path} needs a label map on the image's own grid of {grid.shape} voxels, got {tuple(voxels.shape)}; "
            "bring it there with volseg.inference.original_grid.resample"
        )
    return place(
        nib.Nifti1Image(_to_integers(voxels.reshape(grid.shape), path), grid.affine.numpy()), grid, reference.meta
    )


def _compress(content: memoryview) -> io.BytesIO:
    """Return one gzip member, which every reader takes, without a time stamp: equal maps, equal files."""
    packed, threads = io.BytesIO(), min(MOST_THREADS, os.cpu_count() or 1)
    with igzip_threaded.open(
        packed, "wb", compresslevel=COMPRESSION, threads=threads, block_size=COMPRESSED_TOGETHER
    ) as file:
        file.write(content)
    return packed


def _to_integers(voxels: Tensor, path: Path) -> np.ndarray:
    low, high = voxels.min().item(), voxels.max().item()
    whole = not voxels.is_floating_point() or torch.equal(voxels, voxels.round())
    if not (whole and low >= 0 and high <= LARGEST_VALUE):
        raise DataError(
            f"{path} takes whole labels in [0, {LARGEST_VALUE}], got {voxels.dtype} values from {low} to {high}"
        )
    return _order(voxels.numpy(), np.uint8 if high <= 255 else np.uint16 if high < 2**16 else np.int32)


def _order(voxels: np.ndarray, dtype: type[np.integer]) -> np.ndarray:
    """Return a copy whose first axis is contiguous, as in the file; a block of it fits into the cache."""
    ordered = np.empty(voxels.shape, dtype=dtype, order="F")

    def order(planes: slice) -> None:
        for h in range(0, voxels.shape[1], BLOCK_SIDE):
            ordered[planes, h : h + BLOCK_SIDE] = voxels[planes, h : h + BLOCK_SIDE]

    run_over_slabs(order, voxels.shape, BLOCK_SIDE)
    return ordered
