"""Where a NIfTI file that is written beside an image says that its voxels lie: where the image's file says."""

from collections.abc import Mapping
from typing import Any

import nibabel as nib
import numpy as np

from volseg.data.volume import SCANNER_ANATOMICAL
from volseg.transforms.grid import Grid

__all__ = ["place"]

STRIPPED_SHEAR = 1e-3
"""A quaternion in float32 reproduces an affine without shear to a hundredth of this (mm per voxel)."""


def place(image: nib.Nifti1Image, grid: Grid, meta: Mapping[str, Any]) -> nib.Nifti1Image:
    """Return ``image`` with the sform and qform of the reference's header; ``meta`` is as the readers set it."""
    affine = grid.affine.numpy()
    sform, qform = (int(meta.get(key, SCANNER_ANATOMICAL)) for key in ("sform_code", "qform_code"))
    image.set_sform(affine, code=sform)
    image.set_qform(np.asarray(meta.get("qform_affine", affine)), code=qform, strip_shears=True)
    if sform and "qform_affine" not in meta and not np.allclose(image.get_qform(), affine, atol=STRIPPED_SHEAR):
        image.set_qform(None, code=0)  # a quaternion holds no shear (tilted gantry): rather none than a wrong place
    image.header.set_xyzt_units("mm")
    return image
