"""Where the voxels of a case lie, and whether its files begin as they should: no voxel is read where that can be."""

from pathlib import Path

import numpy as np

from volseg.data.nifti import read_nifti_affine
from volseg.data.readers import choose_reader, read_volume
from volseg.errors import ReaderError

__all__ = ["read_affine", "require_header"]


def read_affine(path: str | Path) -> np.ndarray:
    """Return the affine of an image, 4 x 4, voxel index to RAS+ position in mm; of NIfTI only the header is read.

    Raises
    ------
    ReaderError
        The path does not exist, or cannot be read as far as needed.
    """
    path = Path(path)
    if _is_nifti(path):
        return read_nifti_affine(path)
    return read_volume(path).affine.numpy(force=True)


def require_header(path: str | Path) -> None:
    """Raise unless there is a file that something reads, which begins as its kind does where that is NIfTI.

    Raises
    ------
    ReaderError
        It cannot be an image, whatever its voxels are.
    """
    path = Path(path)
    choose_reader(path)
    try:
        if _is_nifti(path):
            read_nifti_affine(path)
    except OSError as fault:  # no right to read it, a share that is gone
        raise ReaderError(f"{path} cannot be read ({fault.strerror or fault}); mend that, or leave it out") from fault


def _is_nifti(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith((".nii", ".nii.gz"))
