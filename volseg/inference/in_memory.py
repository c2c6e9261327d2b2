"""Convert images in memory to volumes, and label maps back to the kind of their image.

| given | label map |
| --- | --- |
| a path, or one per channel; a volume of `volseg.read_volume` | volume (1, D, H, W) with affine |
| an array or a tensor with an affine | array or tensor (D, H, W) |
| an image of nibabel | NIfTI image, as `write_prediction` writes it |
| an image of SimpleITK | image of SimpleITK |
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.case_store.preprocessed import Preprocessing, preprocess
from volseg.data.itk import image_affine, image_voxels, simpleitk
from volseg.data.nifti import convert_nifti
from volseg.data.readers import read_volume
from volseg.data.volume import as_volume
from volseg.errors import DataError
from volseg.fields import Case
from volseg.inference.streaming import count_free_bytes
from volseg.inference.writing import build_label_image
from volseg.transforms.preprocessing import Preprocessing as Composed

logger = logging.getLogger(__name__)


NOWHERE = Path("the image in memory")
"""Placeholder for a file name, in messages."""


def to_volume(given: Any, affine: Any = None) -> MetaTensor:
    """Return an image in the form that `volseg.read_volume` returns for its file.

    Parameters
    ----------
    given : path, sequence of paths, MetaTensor, array, Tensor, or image of nibabel or SimpleITK
        An array or a tensor is (D, H, W) or (C, D, H, W).
    affine : array, optional
        Required for an array or a tensor, and only for these: 4 x 4, voxel index to RAS+ position (mm).

    Raises
    ------
    DataError
        If the image is of another kind, or its voxels have no place in the patient.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise DataError("a masked array has voxels without values: fill them first (array.filled(value))")
    is_bare = isinstance(given, np.ndarray | Tensor) and not isinstance(given, MetaTensor)
    if is_bare != (affine is not None):
        needs = (
            "needs an affine (4 x 4, voxel index to RAS+ mm)" if is_bare else "has a place of its own: give no affine"
        )
        raise DataError(f"an image given as {type(given).__name__} {needs}")
    if isinstance(given, tuple | list) and not all(isinstance(one, str | Path) for one in given):
        raise DataError(
            "several files are paths, one per channel; stack arrays to one of the shape (C, D, H, W) with an affine"
        )
    if isinstance(given, str | Path | tuple | list):
        return read_volume(given)
    if isinstance(given, Tensor) and (given.layout is not torch.strided or given.is_meta or given.is_complex()):
        raise DataError(f"a tensor should be dense, real and with values, got {given.layout} of {given.dtype}")
    if isinstance(given, MetaTensor):
        _require_as_read(given)
        return given.detach().to(torch.float32)
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return convert_nifti(given, NOWHERE)
    if _is_simpleitk(given):
        voxels, affine = image_voxels(given, NOWHERE), image_affine(given)
    elif is_bare:
        if isinstance(given, Tensor):
            given = given.float() if given.dtype is torch.bfloat16 else given  # NumPy has no bfloat16
            given = given.numpy(force=True)
        voxels = given
        voxels = voxels[None] if voxels.ndim == 3 else voxels
    else:
        raise DataError(
            f"an image should be a path, a volume of volseg.read_volume, an array with an affine, or an image of "
            f"nibabel (NIfTI) or SimpleITK; got {type(given).__name__}"
        )
    return as_volume(voxels, _read_affine(affine), NOWHERE, stored=voxels.dtype)


def _read_affine(affine: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return an affine as numbers, 4 x 4."""
    try:
        matrix = np.asarray(affine.detach().cpu() if isinstance(affine, Tensor) else affine, dtype=np.float64)
    except (TypeError, ValueError) as fault:
        raise DataError(f"an affine should be 4 x 4 numbers (voxel index to RAS+ mm): {fault}") from fault
    if matrix.shape != (4, 4):
        raise DataError(f"an affine should be 4 x 4 (voxel index to RAS+ mm), got the shape {matrix.shape}")
    if matrix[3].tolist() != [0, 0, 0, 1]:
        raise DataError(
            f"the last row of an affine should be 0, 0, 0, 1, got {', '.join(f'{value:g}' for value in matrix[3])}; "
            "a matrix for row vectors must be transposed"
        )
    return matrix


def _require_as_read(volume: MetaTensor) -> None:
    """Raise unless a volume is on the grid of its file."""
    if volume.ndim != 4 or not volume.numel():
        raise DataError(f"a volume should have the shape (C, D, H, W), got {tuple(volume.shape)}")
    original, sides = volume.meta.get("original_affine"), volume.meta.get("spatial_shape")
    has_moved = original is not None and not np.array_equal(np.asarray(original), np.asarray(volume.affine))
    is_cut = sides is not None and tuple(map(int, sides)) != tuple(volume.shape[1:])
    if has_moved or is_cut or volume.applied_operations or volume.pending_operations:
        raise DataError(
            "a volume should lie on the grid of its file, and transforms were applied to this one: give the voxels and "
            "their affine (volume.as_tensor(), volume.affine), or the file"
        )


def as_kind_of(given: Any, label_map: MetaTensor, image: MetaTensor, names: Mapping[int, str]) -> Any:
    """Return a label map (1, D, H, W) on the image's grid as the same kind of object as the given image.

    Parameters
    ----------
    given : Any
        The argument of `to_volume`.
    label_map : MetaTensor
        On the original grid of the image.
    image : MetaTensor
        The volume of ``given``.
    names : mapping
        Names of the labels by value, for an image of nibabel.
    """
    if isinstance(given, nibabel.Nifti1Image | nibabel.Nifti2Image):
        return build_label_image(label_map, image, NOWHERE, names)
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
    """Return whether an object is SimpleITK's, without importing SimpleITK."""
    return type(given).__module__.partition(".")[0] == "SimpleITK" and hasattr(given, "GetDirection")


# Preprocess an image on the GPU that predicts it: resampling a CT there takes as long as its transfer.
#
# The computing thread does this work, since no other thread may use a GPU during a capture. Reductions (means,
# quantiles) and nearest-voxel sampling stay on the CPU, where the training computed them: a GPU could give other
# numbers. A resampled voxel may differ in the last bit of float32.


BYTES_ON_THE_WAY = 24
"""Bytes for each voxel that was read: its float32 and float64 values, and two copies of the result."""

LARGEST_PART = 4
"""Preparation may take a quarter of the free memory, since an image is small beside its windows' memory."""

KEPT_PART = 8
"""A prepared image stays on the device if it takes at most an eighth of the free memory: windows are cut there."""


def suits(preprocessing: Preprocessing, device: torch.device) -> bool:
    """Return whether a device gives the CPU's results of preprocessing, and is faster."""
    return device.type != "cpu" and isinstance(preprocessing, Composed) and preprocessing.suits_devices


def prepare_on(device: torch.device, read: dict[str, Any], preprocessing: Preprocessing) -> Case:
    """Return the preprocessed case; its image is on the device if that `suits` and has room, else on the CPU.

    Parameters
    ----------
    device : torch.device
        Device of the networks.
    read : dict
        The case as read; the call empties the dictionary.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    """
    image = read["image"]
    suited = suits(preprocessing, device)
    if not suited or image.numel() * BYTES_ON_THE_WAY > count_free_bytes(device) // LARGEST_PART:
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    try:
        prepared = preprocess({**read, "image": image.to(device)}, read, preprocessing, keep_reference=False)
    except torch.OutOfMemoryError as fault:
        logger.info("an image is prepared on the CPU: %s", str(fault).partition("\n")[0])
        prepared = None
    if prepared is None:  # outside the block above, whose exception keeps the failed tensors alive
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    read.clear()
    made: MetaTensor = prepared["image"]
    if made.numel() * made.element_size() > count_free_bytes(device) // KEPT_PART:
        prepared["image"] = made.cpu()
    return prepared
