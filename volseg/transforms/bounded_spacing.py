"""Resample to a spacing like MONAI, with bounded memory, only if needed, and within planes on request.

If a volume already has the orientation or the spacing, no voxel moves. MONAI still runs its usual path and copies the
metadata, in one or two milliseconds per volume; reading a small volume takes less. Here the columns of the affine
decide, and the result equals MONAI's: the same voxels, metadata and trace, which ``Invertd`` can invert. If the
columns do not decide clearly (a sheared affine, axes between two directions, pending operations), MONAI computes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.data import MetaTensor, get_track_meta
from monai.data.meta_obj import MetaObj
from monai.data.utils import AFFINE_TOL
from monai.transforms import Orientationd, Spacingd, SpatialResample
from monai.utils import MetaKeys, TraceKeys
from nibabel.orientations import axcodes2ornt

from volseg.errors import GridError
from volseg.fields import LABEL_FIELDS, Case
from volseg.memory import available_bytes
from volseg.transforms.grid import ANISOTROPY, Grid, find_coarse_axis
from volseg.transforms.resampling import SlabResample

RESAMPLING_BYTES = 24
"""Bytes per new voxel while MONAI resamples: three coordinates in float64; each channel takes 8 more."""

MOST_VOXELS = 2**31 - 1
"""Most voxels of a resampled volume, since torch's kernels count voxels in 32 bits."""

ALWAYS_FITS = 1 << 28
"""Bytes up to which the free memory is not checked."""


class BoundedSpacing(Spacingd):
    """MONAI's ``Spacingd``, computed slab by slab; a volume that would not fit the memory is refused first.

    Beyond a volume its border continues. A case at the spacing is returned at once, equal to MONAI's result.
    """

    def __init__(
        self,
        fields: Sequence[str],
        *,
        pixdim: Sequence[float],
        mode: Sequence[str] | str,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(fields, pixdim, mode=mode, padding_mode="border", allow_missing_keys=allow_missing_keys)
        self.spacing_transform.sp_resample = SlabResample(
            mode="bilinear", padding_mode="border", align_corners=False, dtype=np.float64
        )

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing.

        Raises
        ------
        GridError
            If a resampled volume would exceed `MOST_VOXELS` or the available memory.
        """
        target = [float(side) for side in self.spacing_transform.pixdim]
        if not (self.lazy if lazy is None else lazy):
            modes = dict(self.key_iterator(data, self.mode))
            kept = keep_spaced(data, modes, target, self.spacing_transform.sp_resample)
            if kept is not None:
                return kept
        for field in self.key_iterator(data):
            grid = Grid.of(data[field])
            sides = grid.affine[:3, :3].norm(dim=0).tolist()
            shape = [math.ceil(n * side / to) for n, side, to in zip(grid.shape, sides, target, strict=True)]
            needed = math.prod(shape) * (RESAMPLING_BYTES + 8 * len(data[field]))
            if math.prod(shape) > MOST_VOXELS or (needed > ALWAYS_FITS and needed > available_bytes()):
                raise GridError(
                    f"{field} has {grid.shape} voxels of {' x '.join(f'{side:.4g}' for side in sides)} mm; at the "
                    f"spacing {target} mm that is {tuple(shape)} voxels, {needed / 2**30:.1f} GiB to resample. Correct "
                    "the spacing in the header if it is wrong, else choose a coarser spacing or leave the case out"
                )
        return super().__call__(data, lazy)


class PlaneSpacing(BoundedSpacing):
    """Resample thick slices only within their planes, and take the nearest plane along the coarse axis."""

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case at the spacing; without thick slices as `BoundedSpacing` does."""
        target = [float(side) for side in self.spacing_transform.pixdim]
        fields = list(self.key_iterator(data))
        sides = Grid.of(data[fields[0]]).affine[:3, :3].norm(dim=0).tolist()
        axis = find_coarse_axis(sides if max(sides) / min(sides) > ANISOTROPY else target)
        if axis is None:
            return super().__call__(data, lazy)
        within = [sides[axis] if i == axis else side for i, side in enumerate(target)]
        modes = ["nearest" if field in LABEL_FIELDS else "bilinear" for field in fields]
        planes = BoundedSpacing(fields, pixdim=within, mode=modes)
        return BoundedSpacing(fields, pixdim=target, mode="nearest")(planes(data))


PLAIN_SHEAR = 1e-4
"""Largest cosine between two axes up to which the affine's columns determine the orientation."""

PLAIN_LEAD = 1e-2
"""Smallest difference between the two largest cosines of an axis with the body's axes."""

PLAIN_SHIFT = 1e-4
"""Largest shift of a corner by shear (mm): a tenth of `AFFINE_TOL`, MONAI's tolerance for equal affines."""


class _Axes(NamedTuple):
    """The columns of an affine."""

    sides: np.ndarray
    """Sides of a voxel, in mm."""
    cosines: np.ndarray
    """Directions of the axes, one per column."""
    shear: float
    """Largest cosine between two axes; NaN if an axis has length 0."""


class KeptOrientation(Orientationd):
    """MONAI's ``Orientationd``, which returns a volume of the wanted orientation at once."""

    def __init__(
        self, keys: Sequence[str], axcodes: str, labels: Sequence[tuple[str, str]], allow_missing_keys: bool = False
    ) -> None:
        super().__init__(keys, axcodes=axcodes, labels=labels, allow_missing_keys=allow_missing_keys)
        self._wanted = axcodes2ornt(axcodes, labels)

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the case with its volumes reoriented to the axis codes."""
        waits = self.lazy if lazy is None else lazy
        case = dict(data)
        for field in self.key_iterator(case):
            kept = None if waits else self._keep(case[field])
            case[field] = self.ornt_transform(case[field], lazy=waits) if kept is None else kept
        return case

    def _keep(self, volume: MetaTensor) -> MetaTensor | None:
        trace = self.ornt_transform.get_transform_info()
        if not _is_plain(volume) or not trace.get(TraceKeys.TRACING):
            return None
        affine = volume.affine
        if not _points(_read_axes(affine.numpy()), self._wanted):
            return None
        kept = _copy_of(volume, volume.as_tensor())
        kept.meta[MetaKeys.AFFINE] = affine @ torch.eye(4, dtype=torch.float64)  # as MONAI: turns -0 into 0
        _note(kept, trace, {"original_affine": affine.numpy().copy()})
        return kept


def keep_spaced(
    case: Mapping[str, Any], modes: Mapping[str, str], target: Sequence[float], step: SpatialResample
) -> Case | None:
    """Return the result of `Spacingd` for a case that already has the spacing; None otherwise or in doubt.

    Parameters
    ----------
    case : mapping
        Case with volumes (C, D, H, W).
    modes : mapping of str to str
        Fields to compare, with MONAI's interpolation of each, in float64.
    target : sequence of float
        The spacing (mm) along D, H, W.
    step : SpatialResample
        Transform to record in the trace.
    """
    trace = step.get_transform_info()
    others = any(str(name).startswith(tuple(f"{field}_" for field in modes)) for name in case)  # MONAI updates these
    if others or not trace.get(TraceKeys.TRACING):
        return None
    if not all(_is_plain(case[field]) and _is_spaced(case[field], target) for field in modes):
        return None
    found = dict(case)
    for field, mode in modes.items():
        voxels = case[field].as_tensor().to(torch.float32, memory_format=torch.contiguous_format)
        found[field] = _copy_of(case[field], voxels)
        resampled = {"dtype": "float64", "mode": mode, "padding_mode": "border", "align_corners": False}
        _note(found[field], trace, {**resampled, "src_affine": case[field].affine.clone()})
    return found


def _is_plain(volume: object) -> bool:
    """Return whether a volume has tracked metadata, a float64 affine and no pending operations."""
    return (
        isinstance(volume, MetaTensor)
        and get_track_meta()
        and volume.as_tensor().ndim == 4
        and not volume.is_batch
        and not volume.has_pending_operations
        and MetaKeys.PIXDIM not in volume.meta
        and volume.affine.shape == (4, 4)
        and volume.affine.dtype == torch.float64
        and volume.affine[3].tolist() == [0, 0, 0, 1]  # MONAI sets it so
    )


def _read_axes(affine: np.ndarray) -> _Axes:
    columns = affine[:3, :3]
    sides = np.sqrt(np.sum(columns * columns, axis=0))  # the same bits as MONAI
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = columns / sides
    shear = np.abs(cosines.T @ cosines)[(0, 0, 1), (1, 2, 2)]
    return _Axes(sides, cosines, float(shear.max()))


def _points(axes: _Axes, wanted: np.ndarray) -> bool:
    """Return whether each axis clearly points in its wanted direction; ``wanted`` is a nibabel orientation."""
    if not axes.shear <= PLAIN_SHEAR:
        return False
    sizes = np.abs(axes.cosines)
    towards = sizes.argmax(axis=0)
    _, second, first = np.sort(sizes, axis=0)
    signs = np.sign(axes.cosines[towards, (0, 1, 2)])
    return bool(
        (first - second > PLAIN_LEAD).all() and (towards == wanted[:, 0]).all() and (signs == wanted[:, 1]).all()
    )


def _is_spaced(volume: MetaTensor, target: Sequence[float]) -> bool:
    """Return whether MONAI would not change a volume: it has the target's sides within `AFFINE_TOL`, and no shear.

    MONAI removes shear. The shear of a float32 header moves no corner by `AFFINE_TOL`, MONAI's tolerance, and does not
    change the number of voxels.
    """
    axes, wanted = _read_axes(volume.affine.numpy()), np.asarray(target, dtype=np.float64)
    if not ((wanted - AFFINE_TOL <= axes.sides) & (axes.sides <= wanted + AFFINE_TOL)).all():
        return False
    moved = axes.shear * float(axes.sides @ np.asarray(volume.as_tensor().shape[1:]))
    return bool(moved <= PLAIN_SHIFT * min(1.0, float(axes.sides.min())))


def _copy_of(volume: MetaTensor, voxels: torch.Tensor) -> MetaTensor:
    """Return voxels with a copy of a volume's metadata: its dictionary and its list of operations."""
    kept = voxels.as_subclass(MetaTensor)
    MetaObj.__init__(kept)  # the only part of `MetaTensor.__init__` that is needed
    return kept.copy_meta_from(volume)


def _note(volume: MetaTensor, trace: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Append a step to the volume's trace, in MONAI's form."""
    shape = tuple(int(side) for side in volume.as_tensor().shape[1:])
    noted = {TraceKeys.ORIG_SIZE: shape, TraceKeys.LAZY: False, TraceKeys.EXTRA_INFO: dict(extra)}
    volume.push_applied_operation({**trace, **noted})
