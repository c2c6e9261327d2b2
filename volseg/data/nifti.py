"""Read NIfTI-1 and NIfTI-2 files by nibabel.

A compressed file is decompressed to its end, because only there does gzip check that no bit has flipped; nibabel alone
stops at the last voxel and returns damaged voxels without a word.
"""

import gzip
import logging
import zlib
from contextlib import suppress
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError

from volseg.data.volume import as_volume
from volseg.errors import ReaderError

__all__ = ["read_nifti"]

logger = logging.getLogger(__name__)

MILLIMETRES = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
"""Size of NIfTI's spatial units: unknown (taken as mm), metre, millimetre, micrometre."""


def read_nifti(path: Path) -> MetaTensor:
    """Read a NIfTI file as ``(C, D, H, W)`` float32 with its affine in mm.

    A fourth axis (or a fifth, where the fourth is 1: NIfTI's vectors) becomes the channels. The affine is the sform,
    else the qform; a file with neither is placed by its spacing alone, as nibabel does, and a warning is logged.

    Raises
    ------
    ReaderError
        The file is truncated, damaged or not NIfTI, or has other axes.
    """
    image = _parse(path)
    header = image.header
    sform_code, qform_code = int(header["sform_code"]), int(header["qform_code"])
    if sform_code == qform_code == 0:
        logger.warning("%s has neither sform nor qform; it is placed by its voxel spacing alone", path)
    affine = np.array(image.affine, dtype=np.float64)
    scale = MILLIMETRES.get(int(header["xyzt_units"]) & 7, 1.0)
    affine[:3] *= scale
    stored = image.get_data_dtype()
    voxels = _put_channels_first(
        _read_voxels(image, path) if stored.kind in "biuf" else np.empty(image.shape, stored), path
    )
    volume = as_volume(voxels, affine, path, stored=stored, sform_code=sform_code, qform_code=qform_code)
    if sform_code and qform_code:
        # A prediction keeps both places: ITK-SNAP and others go by the qform.
        with suppress(ValueError, HeaderDataError):  # a damaged quaternion that the sform overrules
            volume.meta["qform_affine"] = torch.from_numpy(np.diag([scale, scale, scale, 1.0]) @ image.get_qform())
    return volume


def _parse(path: Path) -> nibabel.Nifti1Image:
    try:
        payload = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
        for kind in (nibabel.Nifti1Image, nibabel.Nifti2Image):
            if kind.header_class.may_contain_header(payload[:540]):
                return kind.from_bytes(payload)
    except (OSError, EOFError, ValueError, zlib.error, HeaderDataError, ImageFileError) as fault:
        raise ReaderError(f"{path} is truncated or damaged ({fault}); fetch it again") from fault
    raise ReaderError(
        f"{path} is no NIfTI file: its header is neither NIfTI-1 nor NIfTI-2; convert it or fetch it again"
    )


def _read_voxels(image: nibabel.Nifti1Image, path: Path) -> np.ndarray:
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return image.get_fdata(dtype=np.float32, caching="unchanged")
    except (OSError, EOFError, ValueError, OverflowError) as fault:
        raise ReaderError(f"{path} is truncated or damaged ({fault}); fetch it again") from fault


def _put_channels_first(voxels: np.ndarray, path: Path) -> np.ndarray:
    """Turn ``(D, H, W)``, ``(D, H, W, C)`` or ``(D, H, W, 1, C)`` into ``(C, D, H, W)``."""
    shape = voxels.shape
    if len(shape) == 5 and 1 in shape[3:]:
        voxels = voxels.reshape(*shape[:3], -1)
    elif len(shape) == 3:
        voxels = voxels[..., None]
    if voxels.ndim != 4:
        raise ReaderError(f"{path} has the shape {shape}; needed: three spatial axes and at most one axis of channels")
    return np.moveaxis(voxels, -1, 0)
