"""nnU-Net's resampling: splines along each axis in turn, thick slices by the nearest plane.

nnU-Net calls skimage's ``resize``, which is scipy's ``zoom`` with the borders of both grids on each other, and clips
to the range of what went in. A spline along three axes is three splines, one after the other, and each is a matrix:
the same numbers as scipy's in a fraction of its time, which is most of what a prediction of nnU-Net's takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.ndimage import zoom
from torch import Tensor

from volseg.errors import ConfigError

__all__ = ["Resampling", "compute_thick_axis", "is_number", "resample"]


ANISOTROPY = 3.0
"""nnU-Net's ``ANISO_THRESHOLD``."""

SPLINES = "resample_data_or_seg_to_shape"
LINEAR = "resample_torch_fornnunet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """One of the resampling functions that plans name, with its arguments."""

    order: int = 3
    """Of the spline, 0 (nearest) to 3; along an axis of thick slices ``order_thick`` instead."""
    order_thick: int = 0
    separates: bool | None = None
    """Whether thick slices are treated apart; None: if they are thick enough."""
    threshold: float = ANISOTROPY
    clips: bool = True
    """Whether values beyond those that went in are cut off, as skimage does."""

    @classmethod
    def read(cls, function: object, arguments: Mapping[str, Any], where: str) -> "Resampling":
        """Return the resampling that plans describe.

        Raises
        ------
        ConfigError
            For a function or an argument that is not known here.
        """
        known: dict[str, dict[str, Any]] = {
            SPLINES: {"order": 3, "order_z": 0, "force_separate_z": False},
            LINEAR: {"mode": "linear", "aniso_axis_mode": "nearest-exact", "force_separate_z": None},
        }
        harmless = {"is_seg", "num_threads", "device", "memefficient_seg_resampling", "separate_z_anisotropy_threshold"}
        if function not in known or arguments.get("is_seg"):
            raise ConfigError(f"{where} names {function!r}; what can be followed: {' and '.join(known)} of images")
        if strange := sorted(arguments.keys() - known[str(function)].keys() - harmless):
            raise ConfigError(f"{where} gives {function} the argument {strange[0]!r}, which is not known here")
        given = {**known[str(function)], **arguments}
        separates, threshold = given["force_separate_z"], given.get("separate_z_anisotropy_threshold", ANISOTROPY)
        if not isinstance(separates, bool | None) or not is_number(threshold):
            raise ConfigError(
                f"{where}: force_separate_z should be true, false or null, and its threshold a number; got "
                f"{separates!r} and {threshold!r}"
            )
        if function == LINEAR:
            if (given["mode"], given["aniso_axis_mode"]) != ("linear", "nearest-exact"):
                raise ConfigError(
                    f"{where}: mode {given['mode']!r} with {given['aniso_axis_mode']!r} is not known here"
                )
            return cls(order=1, separates=separates, threshold=threshold, clips=False)
        orders = (given["order"], given["order_z"])
        if any(type(order) is not int for order in orders) or orders[0] not in range(4) or orders[1] not in range(2):
            raise ConfigError(f"{where}: order {given['order']!r} with order_z {given['order_z']!r} is not known here")
        return cls(order=given["order"], order_thick=given["order_z"], separates=separates, threshold=threshold)


def is_number(value: object) -> bool:
    """Say whether a value of a JSON file is a finite number within the range of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


def compute_thick_axis(rule: Resampling, before: Sequence[float], after: Sequence[float]) -> int | None:
    """Return the axis of thick slices, of voxel sides (mm) before and after; None where all axes are alike."""
    if rule.separates is None:
        chosen = next((sides for sides in (before, after) if max(sides) / min(sides) > rule.threshold), None)
    else:
        chosen = before if rule.separates else None
    if chosen is None:
        return None
    coarsest = [axis for axis, side in enumerate(chosen) if max(chosen) / side == 1]
    return coarsest[0] if len(coarsest) == 1 else None  # two thick axes are none


def resample(volume: Tensor, shape: Sequence[int], rule: Resampling, thick: int | None) -> Tensor:
    """Return ``volume`` (C, D, H, W) float32 with ``shape`` voxels between the same outer borders."""
    if tuple(volume.shape[1:]) == tuple(shape):
        return volume
    out = volume.double()
    dims = [axis for axis in range(3) if axis != thick]
    for axis in dims:
        out = _along(out, axis, shape[axis], rule.order)
    if rule.clips:  # each channel by its own range; of thick slices each plane
        kept = [0] if thick is None else [0, thick + 1]
        over = [dim for dim in range(4) if dim not in kept]
        out = out.clamp(volume.amin(over, keepdim=True).double(), volume.amax(over, keepdim=True).double())
    if thick is not None:
        out = _along(out, thick, shape[thick], rule.order_thick)
    return out.float()


def nearest_planes(before: int, after: int, device: torch.device | None = None) -> Tensor:
    """Return, for each of ``after`` planes, which of the ``before`` planes between the same borders is nearest."""
    places = (np.arange(after) + 0.5) * (before / after) - 0.5
    return torch.from_numpy(np.floor(places + 0.5).clip(0, before - 1).astype(np.int64)).to(device)


def _along(volume: Tensor, axis: int, side: int, order: int) -> Tensor:
    """Resample one axis (0, 1, 2 are D, H, W)."""
    before, dim = volume.shape[axis + 1], axis + 1
    if before == side:
        return volume
    if order == 0:
        return volume.index_select(dim, nearest_planes(before, side, volume.device))
    matrix = _spline_matrix(before, side, order).to(volume.device)
    return torch.tensordot(volume, matrix, dims=([dim], [1])).movedim(-1, dim)


@cache
def _spline_matrix(before: int, after: int, order: int) -> Tensor:
    """Return the matrix ``(after, before)`` of scipy's zoom along one axis: what it makes of each unit vector."""
    columns = [zoom(unit, after / before, order=order, mode="nearest", grid_mode=True) for unit in np.eye(before)]
    return torch.from_numpy(np.stack(columns, axis=1))
