"""Read MHA, MHD and NRRD files by SimpleITK, which is imported at the first such file.

ITK's world axes point to the patient's left and back (LPS), those of this package to the right and front (RAS+). Only
here the first two rows of every affine change sign.
"""

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from monai.data import MetaTensor

from volseg.data.itk_headers import require_sound_meta, require_sound_nrrd
from volseg.data.volume import as_volume
from volseg.errors import DamagedFileError, ReaderError

__all__ = ["image_affine", "image_voxels", "lps_to_ras", "read_itk", "simpleitk"]


@cache
def simpleitk() -> ModuleType:
    """Import SimpleITK without its C++ warnings: their causes are errors here, with the file's name.

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
    is_nrrd = path.suffix.lower() in (".nrrd", ".nhdr")
    (require_sound_nrrd if is_nrrd else require_sound_meta)(path)
    try:
        # Named, since ITK would otherwise search for a parser by content, among twenty.
        image = simpleitk().ReadImage(str(path), imageIO="NrrdImageIO" if is_nrrd else "MetaImageIO")
    except RuntimeError as fault:
        raise DamagedFileError(
            f"{path} is truncated, damaged or no {path.suffix} file: SimpleITK cannot read it; fetch it again"
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
    """Turn an affine whose world axes are LPS into one whose world axes are RAS+."""
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
