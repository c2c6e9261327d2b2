"""Where the voxels of a case lie."""

from pathlib import Path

import numpy as np

from volseg.data.nifti import read_nifti_affine
from volseg.data.readers import read_volume

__all__ = ["read_affine"]


def read_affine(path: str | Path) -> np.ndarray:
    """Return the affine of an image, 4 x 4, voxel index to RAS+ position in mm; of NIfTI only the header is read.

    Raises
    ------
    ReaderError
        The path does not exist, or cannot be read as far as needed.
    """
    path = Path(path)
    if path.is_file() and path.name.lower().endswith((".nii", ".nii.gz")):
        return read_nifti_affine(path)
    return read_volume(path).affine.numpy(force=True)
