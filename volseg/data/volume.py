"""Voxels and the map that places them in the patient, as every reader returns them.

MONAI's MetaTensor carries both, so its transforms can be used and inverted. Beside MONAI's own keys, ``meta`` has the
values that a writer needs to save a prediction in the form of the image's file.
"""

from pathlib import Path

import numpy as np
import torch
from monai.data import MetaTensor
from monai.utils import SpaceKeys

from volseg.errors import ReaderError
from volseg.transforms.slabs import run_over_slabs

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
