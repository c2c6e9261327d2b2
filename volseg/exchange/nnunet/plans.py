"""Read geometry, intensities and network of one configuration from nnU-Net's plans, and resample as they specify.

Splines are computed along each axis in turn, thick slices by the nearest plane. nnU-Net calls skimage's ``resize``:
scipy's ``zoom`` with the borders of both grids aligned, clipped to the range of the input. A spline along three axes is
a sequence of three splines, each of which is a matrix. This gives scipy's numbers in a fraction of its time, which
dominates nnU-Net's predictions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import zoom
from torch import Tensor

from volseg.data.json_files import read_json
from volseg.errors import ConfigError, DataError
from volseg.exchange.nnunet.network import read_network

ANISOTROPY = 3.0
"""nnU-Net's ``ANISO_THRESHOLD``."""

SPLINES = "resample_data_or_seg_to_shape"
LINEAR = "resample_torch_fornnunet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """One of the resampling functions that plans name, with its arguments."""

    order: int = 3
    """Order of the spline, 0 (nearest) to 3; ``order_thick`` applies along an axis of thick slices."""
    order_thick: int = 0
    separates: bool | None = None
    """Whether thick slices are resampled separately; None: if they are thick enough."""
    threshold: float = ANISOTROPY
    clips: bool = True
    """Whether the result is clipped to the range of the input, as in skimage."""

    @classmethod
    def read(cls, function: object, arguments: Mapping[str, Any], where: str) -> "Resampling":
        """Return the resampling that plans describe.

        Raises
        ------
        ConfigError
            For a function or an argument that is not supported.
        """
        known: dict[str, dict[str, Any]] = {
            SPLINES: {"order": 3, "order_z": 0, "force_separate_z": False},
            LINEAR: {"mode": "linear", "aniso_axis_mode": "nearest-exact", "force_separate_z": None},
        }
        harmless = {"is_seg", "num_threads", "device", "memefficient_seg_resampling", "separate_z_anisotropy_threshold"}
        if function not in known or arguments.get("is_seg"):
            raise ConfigError(f"{where} names {function!r}; supported: {' and '.join(known)} for images")
        if strange := sorted(arguments.keys() - known[str(function)].keys() - harmless):
            raise ConfigError(f"{where} gives {function} the argument {strange[0]!r}, which is not supported")
        given = {**known[str(function)], **arguments}
        separates, threshold = given["force_separate_z"], given.get("separate_z_anisotropy_threshold", ANISOTROPY)
        if not isinstance(separates, bool | None) or not is_number(threshold):
            raise ConfigError(
                f"{where}: force_separate_z should be true, false or null, and its threshold a number; got "
                f"{separates!r} and {threshold!r}"
            )
        if function == LINEAR:
            if (given["mode"], given["aniso_axis_mode"]) != ("linear", "nearest-exact"):
                raise ConfigError(f"{where}: mode {given['mode']!r} with {given['aniso_axis_mode']!r} is not supported")
            return cls(order=1, separates=separates, threshold=threshold, clips=False)
        orders = (given["order"], given["order_z"])
        if any(type(order) is not int for order in orders) or orders[0] not in range(4) or orders[1] not in range(2):
            raise ConfigError(f"{where}: order {given['order']!r} with order_z {given['order_z']!r} is not supported")
        return cls(order=given["order"], order_thick=given["order_z"], separates=separates, threshold=threshold)


def is_number(value: object) -> bool:
    """Return whether a value of a JSON file is a finite number within the range of float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


def compute_thick_axis(rule: Resampling, before: Sequence[float], after: Sequence[float]) -> int | None:
    """Return the axis of thick slices, given voxel sides (mm) before and after; None if no axis is thick."""
    if rule.separates is None:
        chosen = next((sides for sides in (before, after) if max(sides) / min(sides) > rule.threshold), None)
    else:
        chosen = before if rule.separates else None
    if chosen is None:
        return None
    coarsest = [axis for axis, side in enumerate(chosen) if max(chosen) / side == 1]
    return coarsest[0] if len(coarsest) == 1 else None  # with two coarsest axes, no slices are thick


def resample(volume: Tensor, shape: Sequence[int], rule: Resampling, thick: int | None) -> Tensor:
    """Resample ``volume`` (C, D, H, W), float32, to ``shape`` voxels between the same outer borders."""
    if tuple(volume.shape[1:]) == tuple(shape):
        return volume
    out = volume.double()
    dims = [axis for axis in range(3) if axis != thick]
    for axis in dims:
        out = _along(out, axis, shape[axis], rule.order)
    if rule.clips:  # to the range of each channel, or of each plane of thick slices
        kept = [0] if thick is None else [0, thick + 1]
        over = [dim for dim in range(4) if dim not in kept]
        out = out.clamp(volume.amin(over, keepdim=True).double(), volume.amax(over, keepdim=True).double())
    if thick is not None:
        out = _along(out, thick, shape[thick], rule.order_thick)
    return out.float()


def nearest_planes(before: int, after: int, device: torch.device | None = None) -> Tensor:
    """Return the index of the nearest of ``before`` planes for each of ``after`` planes between the same borders."""
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
    """Return the matrix ``(after, before)`` of scipy's zoom along one axis; its columns are zoomed unit vectors."""
    columns = [zoom(unit, after / before, order=order, mode="nearest", grid_mode=True) for unit in np.eye(before)]
    return torch.from_numpy(np.stack(columns, axis=1))


CONFIGURATIONS = ("3d_fullres", "3d_lowres")

READERS = {"SimpleITKIO": False, "NibabelIO": False, "SimpleITKIOWithReorient": True, "NibabelIOWithReorient": True}
"""nnU-Net's readers of volumes, and whether they turn the axes to RAS."""

SCHEMES = (
    "CTNormalization",
    "ZScoreNormalization",
    "NoNormalization",
    "RescaleTo01Normalization",
    "RGBTo01Normalization",
)

Sides = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetPlan:
    """One configuration of a model folder."""

    name: str
    """Name of the configuration."""
    dataset: str
    network: Mapping[str, Any]
    patch: tuple[int, int, int]
    batch: int
    spacing: Sides
    """Voxel sides (mm) of the network's input, in the order of its axes."""
    transpose: tuple[int, int, int]
    """Axis of the file for each axis of the network; axes count from the slowest (SimpleITK's D, H, W)."""
    turns_to_ras: bool
    schemes: tuple[str, ...]
    masked: tuple[bool, ...]
    """Whether only voxels inside the mask are normalised, by channel."""
    moments: Mapping[str, Mapping[str, float]]
    """Intensity statistics of the data set's foreground, by channel number."""
    of_images: Resampling
    of_logits: Resampling


def read_plan(file: Path, name: str) -> NnunetPlan:
    """Read configuration ``name`` of a ``plans.json``.

    Raises
    ------
    ConfigError
        For a configuration that is not supported; the message names the setting.
    DataError
        If the file is damaged.
    """
    return parse_plan(read_json(file, has_nan=True), file, name)


def parse_plan(plans: Any, file: Path, name: str) -> NnunetPlan:
    """Return configuration ``name`` of the plans in ``file``; the errors are those of `read_plan`."""
    try:
        return _read_plan(plans, file, name)
    except (TypeError, AttributeError, KeyError, IndexError) as fault:  # a value of a wrong type
        raise DataError(
            f"{file} differs from what nnU-Net 2 writes, and cannot be read ({fault}); copy the model folder again"
        ) from fault


def _read_plan(plans: Any, file: Path, name: str) -> NnunetPlan:
    if not isinstance(plans, dict) or not isinstance(plans.get("configurations"), dict):
        raise DataError(f"{file} should contain nnU-Net's plans with their configurations; copy the model folder again")
    given = _resolve(plans["configurations"], name, file)
    where = f"{file}, {name}"
    if given.get("previous_stage"):
        raise ConfigError(
            f"{where} is the second stage of a cascade, which also needs the label maps of {given['previous_stage']}; "
            f"predict with {' or '.join(CONFIGURATIONS)}"
        )
    if not isinstance(given.get("patch_size"), list) or len(given["patch_size"]) != 3:
        raise ConfigError(f"{where} is not a 3D configuration (patch_size {given.get('patch_size')}); "
                          f"name the folder of {' or '.join(CONFIGURATIONS)}")  # fmt: skip
    if given.get("preprocessor_name", "DefaultPreprocessor") != "DefaultPreprocessor":
        raise ConfigError(f"{where} preprocesses with {given['preprocessor_name']}; supported: DefaultPreprocessor")
    if plans.get("label_manager", "LabelManager") != "LabelManager":
        raise ConfigError(f"{where} uses the label manager {plans['label_manager']}; supported: LabelManager")
    reader = plans.get("image_reader_writer")
    if reader not in READERS:
        raise ConfigError(f"{where} reads images by {reader}; supported: {', '.join(READERS)}")
    schemes, masked = given.get("normalization_schemes"), given.get("use_mask_for_norm")
    if not (isinstance(schemes, list) and isinstance(masked, list)) or [*map(type, masked)] != [bool] * len(schemes):
        raise DataError(f"{where} needs a scheme and a mask setting for each channel, got {schemes} and {masked}")
    if unknown := [scheme for scheme in schemes if scheme not in SCHEMES]:
        raise ConfigError(f"{where} normalises by {unknown[0]}; supported: {', '.join(SCHEMES)}")
    network = read_network(given, where)
    patch = _three(given["patch_size"], int, f"{where}: patch_size")
    steps = [math.prod(s if isinstance(s, int) else s[axis] for s in network["strides"]) for axis in range(3)]
    if any(side % step for side, step in zip(patch, steps, strict=True)):
        raise ConfigError(f"{where}: patch_size {list(patch)} is not a multiple of its strides' products {steps}")
    return NnunetPlan(
        name=name,
        dataset=str(plans.get("dataset_name") or file.parent.parent.name),
        network=network,
        patch=patch,
        batch=given["batch_size"] if type(given.get("batch_size")) is int else 2,
        spacing=_three(given.get("spacing"), float, f"{where}: spacing"),
        transpose=_read_transpose(plans, file),
        turns_to_ras=READERS[reader],
        schemes=tuple(schemes),
        masked=tuple(masked),
        moments=_read_moments(plans, schemes, file),
        of_images=_read_resampling(given, "data", where),
        of_logits=_read_resampling(given, "probabilities", where),
    )


def _resolve(configurations: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    """Return a configuration with its inherited settings."""
    chain, seen, wanted = [], set[str](), name
    while True:
        found = configurations.get(wanted)
        if not isinstance(found, dict) or wanted in seen:
            raise DataError(f"{file} has no valid configuration {wanted!r}; it has {list(configurations)}")
        chain.append(found)
        seen.add(wanted)
        if "inherits_from" not in found:
            return {key: value for one in reversed(chain) for key, value in one.items()}
        wanted = found["inherits_from"]


def _three(values: Any, kind: type, where: str) -> tuple[Any, Any, Any]:
    if not isinstance(values, list) or len(values) != 3 or not all(map(is_number, values)) or min(values) <= 0:
        raise DataError(f"{where} should be three positive numbers, got {values!r:.200}")
    a, b, c = (kind(value) for value in values)
    if [a, b, c] != values:
        raise DataError(f"{where} should be three whole numbers, got {values!r:.200}")
    return a, b, c


def _read_transpose(plans: Mapping[str, Any], file: Path) -> tuple[int, int, int]:
    order, back = plans.get("transpose_forward"), plans.get("transpose_backward")
    if order not in [list(axes) for axes in permutations(range(3))]:
        raise DataError(f"{file}: transpose_forward should be an order of 0, 1, 2, got {order!r}")
    a, b, c = order
    if back != [order.index(axis) for axis in range(3)]:
        raise DataError(f"{file}: transpose_backward should undo transpose_forward {order}, got {back!r}")
    return a, b, c


def _read_moments(plans: Mapping[str, Any], schemes: list[str], file: Path) -> dict[str, dict[str, float]]:
    """Return the intensity statistics of each channel with the CT scheme."""
    keys = ("foreground_intensity_properties_per_channel", "foreground_intensity_properties_by_modality")
    found: Mapping[str, Any] = next((plans[key] for key in keys if key in plans), {})
    moments = {}
    for channel, scheme in enumerate(schemes):
        if scheme != "CTNormalization":
            continue
        given = found.get(str(channel), {})
        wanted = ("mean", "std", "percentile_00_5", "percentile_99_5")
        if not all(is_number(given.get(key)) for key in wanted):
            raise DataError(f"{file} should contain {', '.join(wanted)} of channel {channel}, got {given!r}")
        moments[str(channel)] = {key: float(given[key]) for key in wanted}
    return moments


def _read_resampling(given: Mapping[str, Any], what: str, where: str) -> Resampling:
    key = f"resampling_fn_{what}"
    arguments = given.get(f"{key}_kwargs") or {}
    rule = Resampling.read(given.get(key), arguments, f"{where}: {key}")
    if what == "probabilities" and (rule.order, rule.order_thick) not in ((1, 0), (1, 1)):
        raise ConfigError(f"{where}: {key} uses splines of order {rule.order}; supported: 1")
    return rule
