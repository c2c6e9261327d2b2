"""Volumes in memory: from anybody's kind of image to a volume, and a label map back to that kind.

| given | label map |
| --- | --- |
| a path, or one per channel; a volume of `volseg.read_volume` | volume (1, D, H, W) with affine |
| an array or a tensor with an affine | array or tensor (D, H, W) |
| an image of nibabel | NIfTI image, as `write_prediction` writes it |
| an image of SimpleITK | image of SimpleITK |
"""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.itk import image_affine, image_voxels, simpleitk
from volseg.data.nifti import convert_nifti
from volseg.data.readers import read_volume
from volseg.data.volume import as_volume
from volseg.errors import DataError
from volseg.inference.writing import build_label_image

__all__ = ["as_kind_of", "to_volume"]

NOWHERE = Path("the image in memory")
"""In place of a file's name, in messages."""


def to_volume(given: Any, affine: Any = None) -> MetaTensor:
    """Return an image as `volseg.read_volume` returns the file of it.

    Parameters
    ----------
    given : path, sequence of paths, MetaTensor, array, Tensor, or image of nibabel or SimpleITK
        An array or a tensor is (D, H, W) or (C, D, H, W).
    affine : array, optional
        Of an array or a tensor, which needs one: 4 x 4, voxel index to RAS+ position (mm).

    Raises
    ------
    DataError
        If the image is of another kind, or its voxels have no place in the patient.
    """
    is_bare = isinstance(given, np.ndarray | Tensor) and not isinstance(given, MetaTensor)
    if is_bare != (affine is not None):
        needs = (
            "needs an affine (4 x 4, voxel index to RAS+ mm)" if is_bare else "has a place of its own: give no affine"
        )
        raise DataError(f"an image given as {type(given).__name__} {needs}")
    if isinstance(given, str | Path | tuple | list):
        return read_volume(given)
    if isinstance(given, MetaTensor):
        if given.ndim != 4:
            raise DataError(f"a volume should have the shape (C, D, H, W), got {tuple(given.shape)}")
        return given if given.dtype == torch.float32 else given.to(torch.float32)
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return convert_nifti(given, NOWHERE)
    if _is_simpleitk(given):
        voxels, affine = image_voxels(given, NOWHERE), image_affine(given)
    elif is_bare:
        voxels = given.numpy(force=True) if isinstance(given, Tensor) else given
        voxels = voxels[None] if voxels.ndim == 3 else voxels
    else:
        raise DataError(
            f"an image should be a path, a volume of volseg.read_volume, an array with an affine, or an image of "
            f"nibabel (NIfTI) or SimpleITK; got {type(given).__name__}"
        )
    matrix = np.asarray(affine, dtype=np.float64)
    if matrix.shape != (4, 4):
        raise DataError(f"an affine should be 4 x 4 (voxel index to RAS+ mm), got the shape {matrix.shape}")
    return as_volume(voxels, matrix, NOWHERE, stored=voxels.dtype)


def as_kind_of(given: Any, label_map: MetaTensor, image: MetaTensor) -> Any:
    """Return a label map (1, D, H, W) on the image's grid as the kind of what was given.

    Parameters
    ----------
    given : Any
        What `to_volume` took.
    label_map : MetaTensor
        On the original grid of the image.
    image : MetaTensor
        The volume of ``given``.
    """
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return build_label_image(label_map, image, NOWHERE)
    voxels = label_map.as_tensor()[0]
    if _is_simpleitk(given):
        made = simpleitk().GetImageFromArray(np.ascontiguousarray(voxels.numpy().transpose(2, 1, 0)))
        made.SetSpacing(given.GetSpacing()[:3])
        made.SetOrigin(given.GetOrigin()[:3])
        sides = given.GetDimension()
        made.SetDirection(np.reshape(given.GetDirection(), (sides, sides))[:3, :3].ravel().tolist())
        return made
    if isinstance(given, MetaTensor) or not isinstance(given, np.ndarray | Tensor):
        return label_map
    return voxels if isinstance(given, Tensor) else voxels.numpy()


def _is_simpleitk(given: Any) -> bool:
    """Say whether an object is SimpleITK's, which is not imported for it."""
    return type(given).__module__.partition(".")[0] == "SimpleITK" and hasattr(given, "GetDirection")
