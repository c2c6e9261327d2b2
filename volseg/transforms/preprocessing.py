"""Preprocess a case for the network: orientation, spacing, intensities, crop, padding.

MONAI's dictionary transforms do the work. This module gives each a short name for the config, and passes the settings
that keep image and label on one grid. It refuses a volume without an affine (MONAI assumes the identity, MONAI#8399),
and an image and a label on different grids, since both would silently lead to a wrong geometry.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import (
    CropForegroundd,
    DivisiblePad,
    MapTransform,
    Orientationd,
    Padd,  # codespell:ignore padd
    SpatialPad,
)

from volseg.config.registry import Registry
from volseg.config.sections import PREVIOUS_STAGE
from volseg.errors import ConfigError, DataError, GridError, VolsegError
from volseg.fields import LABEL_FIELDS, Case
from volseg.transforms.grid import TIE, Grid
from volseg.transforms.intensities import ClipZScore, ZScore
from volseg.transforms.resampling import Spacing

GEOMETRIC = frozenset({"CropForeground", "Orientation", "Pad", "Spacing"})
"""Components that change the grid."""


def build_preprocessing(
    components: Sequence[Mapping[str, Any]], fields: Sequence[str] = ("image", "label")
) -> "Preprocessing":
    """Compose the preprocessing that a config lists.

    Parameters
    ----------
    components : sequence of mapping
        ``{"name": "Spacing", "spacing": [1, 1, 1]}``, in order of application. Names: `PREPROCESSING`.
    fields : sequence of str, optional
        Fields of a case to transform. The first is the image that determines crops. Fields of `LABEL_FIELDS` are
        optional, since a case to predict has no label.

    Raises
    ------
    ConfigError
        If a component or parameter is unknown (names the nearest known ones), or the order cannot be inverted.
    """
    if not fields or fields[0] in LABEL_FIELDS:
        raise ConfigError(f"preprocessing needs fields with an image first, got {list(fields)}")
    names = [component.get("name") for component in components]
    if "Pad" in names and (late := GEOMETRIC.intersection(names[names.index("Pad") + 1 :])):
        raise ConfigError(f"Pad must follow {sorted(late)}: padding is removed before they are inverted")
    if PREVIOUS_STAGE in names[:-1]:
        raise ConfigError(f"{PREVIOUS_STAGE} must be the last step, since no other step may change its channels")
    steps = [_build_step(component, tuple(fields)) for component in components]
    preprocessing = Preprocessing([RememberGrid(fields), *steps, StoreVoxels(fields)])
    preprocessing.components = [dict(component) for component in components]
    return preprocessing


def _build_step(component: Mapping[str, Any], fields: tuple[str, ...]) -> Callable[[Case], Case]:
    step: Callable[[Case], Case] = PREPROCESSING.build(component, fields=fields)
    is_own = PREPROCESSING.get_source(component["name"]) is not None
    return CheckedStep(step, component["name"], fields) if is_own else step


class CheckedStep:
    """Run a custom step, and check the case that it returns.

    Parameters
    ----------
    step : callable
        Function from a case to a case.
    name : str
        Name of the step in the config.
    fields : sequence of str
        Fields that share one grid, the image first.
    """

    def __init__(self, step: Callable[[Case], Case], name: str, fields: Sequence[str]) -> None:
        self.func = step  # named as in functools.partial, so that the owner of the code is found
        self.name = name
        self.fields = fields

    def __call__(self, case: Case) -> Case:
        """Return the case that the step returns.

        Raises
        ------
        GridError
            If a volume has lost its position in the patient, or fields are no longer on the image's grid.
        """
        made = self.func(case)
        for field in (field for field in self.fields if field in case):
            volume = made.get(field) if isinstance(made, Mapping) else None
            if not isinstance(volume, MetaTensor) or volume.ndim != 4 or "original_affine" not in volume.meta:
                raise GridError(
                    f"{self.name} must return a case with a MetaTensor (C, D, H, W) and its metadata in {field}, got a "
                    f"{type(volume).__name__} {tuple(getattr(volume, 'shape', ()))}; use copy_meta_from"
                )
            grid, image = Grid.of(made[self.fields[0]]), self.fields[0]
            grid.require_same(Grid.of(volume), image, f"after {self.name} the {field}")
        return made


class Preprocessing:
    """Apply transforms in sequence; errors name the case and the step.

    A case is ``{"case": str, "image": MetaTensor (C, D, H, W), "label": MetaTensor (1, D, H, W)}``. The result has a
    float32 image and an integer label (uint8 if it fits) on one grid. The voxels of the input are never modified.

    MONAI's ``Compose`` would turn every error into "RuntimeError: applying transform <object at 0x...>".

    Attributes
    ----------
    transforms : sequence of callable
        Steps from a case to a case.
    components : sequence of mapping or None
        Components of `build_preprocessing`; None if it was built in another way.
    """

    components: Sequence[Mapping[str, Any]] | None = None

    def __init__(self, transforms: Sequence[Callable[[Case], Case]]) -> None:
        self.transforms = transforms

    def __call__(self, case: Mapping[str, Any]) -> Case:
        """Return the preprocessed case.

        Raises
        ------
        VolsegError
            `DataError` or `GridError`; names the case, and the step if it raised another error.
        """
        return self.consume(dict(case))

    def consume(self, read: dict[str, Any]) -> Case:
        """Return the preprocessed case, and empty ``read``, so that its memory is free once it is resampled.

        Raises
        ------
        VolsegError
            As `__call__`.
        """
        case = dict(read)
        read.clear()
        for step in self.transforms:
            name = case.get("case", "(unnamed)")
            try:
                case = step(case)
            except VolsegError as fault:
                raise type(fault)(f"case {name}: {fault}") from fault
            except torch.OutOfMemoryError:  # on a GPU: the CPU may have enough memory
                raise
            except (ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError) as fault:
                raise DataError(
                    f"case {name}: {getattr(step, 'name', type(step).__name__)} failed: {fault!r}"
                ) from fault
        return case

    @property
    def suits_devices(self) -> bool:
        """Whether a GPU computes the same, except for the last bit of resampled voxels."""
        kinds = (RememberGrid, Orientationd, Pad, StoreVoxels)
        return all(
            isinstance(step, kinds)
            or (isinstance(step, Spacing) and step.thick_slices == "linear")
            or (isinstance(step, ClipZScore) and step.is_voxelwise)
            for step in self.transforms
        )


class RememberGrid(MapTransform):
    """Check the geometry of a case, and store its original grid in ``meta``.

    ``original_affine`` and ``spatial_shape`` stay in ``meta`` through every later step, so that a prediction can be
    resampled onto the original grid.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        super().__init__(fields, allow_missing_keys=True)
        self.image, *self.others = fields

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case with its grid in ``meta``."""
        case = dict(data)
        for field in (self.image, *(other for other in self.others if other not in LABEL_FIELDS)):
            if field not in case:
                raise DataError(f"preprocessing needs the field {field!r}, but the case has {sorted(case)}")
        grid = _require_grid(case, self.image)
        for field in self.key_iterator(case):
            grid.require_same(_require_grid(case, field), self.image, field)
            # One affine for all fields, since Spacing may round a difference of 1e-6 to one more voxel.
            volume = MetaTensor(case[field].as_tensor()).copy_meta_from(case[field])
            volume.affine = grid.affine.clone()
            volume.meta.setdefault("original_affine", grid.affine.clone())
            volume.meta.setdefault("spatial_shape", grid.shape)
            case[field] = volume
        return case


def _require_grid(case: Mapping[str, Any], field: str) -> Grid:
    volume = case[field]
    if not isinstance(volume, MetaTensor):
        raise GridError(
            f"{field} is a {type(volume).__name__} without an affine, so its voxels have no place in the patient; "
            "read it with Read, or wrap it as MetaTensor(voxels, affine=...)"
        )
    if volume.ndim != 4 or 0 in volume.shape:
        raise GridError(f"{field} must have shape (C, D, H, W) and not be empty, got {tuple(volume.shape)}")
    if field in LABEL_FIELDS and volume.shape[0] != 1:
        raise GridError(f"{field} must be one map of label values (1, D, H, W), got {tuple(volume.shape)}")
    if volume.meta.get("space", "RAS") == "LPS":
        raise GridError(f"the affine of {field} must map to RAS+, but its meta says LPS; read it with Read")
    return Grid.of(volume)


class StoreVoxels(MapTransform):
    """Convert images to float32 and label maps to integers, contiguous in memory."""

    def __init__(self, fields: Sequence[str]) -> None:
        super().__init__(fields, allow_missing_keys=True)

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case with converted fields."""
        case = dict(data)
        for field in self.key_iterator(case):
            dtype = choose_label_dtype(case[field], field) if field in LABEL_FIELDS else torch.float32
            case[field] = case[field].to(dtype).contiguous()
        return case


def choose_label_dtype(label: MetaTensor, field: str = "label") -> torch.dtype:
    """Return the dtype for storing a label map: uint8 if its values fit, else int32.

    Raises
    ------
    DataError
        If the label map contains fractions.
    """
    voxels = label.as_tensor()
    if voxels.is_floating_point() and not torch.equal(voxels, voxels.round()):
        fraction = voxels[voxels != voxels.round()].flatten()[0].item()
        raise DataError(f"{field} must contain whole numbers, got {fraction}; is it a probability map?")
    low, high = voxels.min().item(), voxels.max().item()
    return torch.uint8 if low >= 0 and high <= 255 else torch.int32


def orientation(fields: Sequence[str], *, axcodes: str = "RAS") -> Orientationd:
    """Permute and flip the voxel axes to point to ``axcodes``; no voxel moves in the patient."""
    if sorted(axcodes.translate(str.maketrans("LPI", "RAS"))) != ["A", "R", "S"]:
        raise ValueError(f"axcodes must contain each body axis once, like RAS or LPI, got {axcodes!r}")
    labels = (("L", "R"), ("P", "A"), ("I", "S"))  # affines here are always RAS+
    return Orientationd(fields, axcodes=axcodes, labels=labels, allow_missing_keys=True)


def crop_foreground(
    fields: Sequence[str], *, above: float | None = None, margin: int | Sequence[int] = 0
) -> CropForegroundd:
    """Crop to the box of voxels that are not 0 in some channel, or exceed ``above``, plus ``margin`` voxels.

    The box is clipped to the image. Put this step before `ZScore`, which shifts zero.
    """
    return CropForegroundd(
        fields,
        source_key=fields[0],
        select_fn=Foreground(above),
        margin=margin,
        allow_smaller=True,
        allow_missing_keys=True,
    )


@dataclass(frozen=True, slots=True)
class Foreground:
    """Select voxels that are not 0, or exceed ``above``. A class, since closures cannot be pickled."""

    above: float | None

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """Return the mask of an image ``(C, D, H, W)``."""
        found = image != 0 if self.above is None else image > self.above
        if not found.any():
            rule = "is not 0" if self.above is None else f"exceeds {self.above}"
            raise GridError(f"CropForeground found no voxel that {rule}: the image would be empty; leave it out")
        return found


class Pad(Padd):  # codespell:ignore padd
    """Pad with 0 on both ends: each side to at least ``size`` voxels, or up to a multiple of ``multiple``.

    Only intensity steps may follow. ``meta["padding"]`` contains the number of voxels before and after each axis, so
    that a prediction in the padding is not used for voxels that a crop removed. Put this step after the normalisation,
    so that 0 is the mean. A network that needs a multiple pads by itself.
    """

    def __init__(
        self, fields: Sequence[str], *, size: Sequence[int] | None = None, multiple: int | Sequence[int] | None = None
    ) -> None:
        if (size is None) == (multiple is None):
            raise ValueError(f"needed: either size or multiple, got {size=}, {multiple=}")
        padder = DivisiblePad(multiple) if size is None else SpatialPad(size)
        super().__init__(fields, padder, allow_missing_keys=True)

    def __call__(self, data: Mapping[str, Any], lazy: bool | None = None) -> Case:
        """Return the padded case."""
        case = super().__call__(data, lazy)
        for field in self.key_iterator(case):
            before = Grid.of(data[field]).index_map(Grid.of(case[field]))[:3, 3].round().long().tolist()
            sides = zip(before, data[field].shape[1:], case[field].shape[1:], strict=True)
            case[field].meta["padding"] = tuple((start, new - old - start) for start, old, new in sides)
        return case


class PreviousStage:
    """Append a mask per label of the field ``stage``, the previous stage's label map, to the image as channels.

    Each voxel gets the label of the nearest voxel of the label map (the last of equally near ones), or background
    outside the label map.
    """

    def __init__(self, fields: Sequence[str], *, labels: Sequence[int]) -> None:
        if not labels:
            raise ValueError("labels must list at least one value of the label map, got none")
        self.image, self.labels = fields[0], tuple(labels)

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case with the masks, and without ``stage``."""
        case = dict(data)
        image, stage = case[self.image], case.pop("stage", None)
        if not isinstance(stage, MetaTensor):
            raise DataError("the case has no label map of the previous stage")
        to_stage = Grid.of(image).index_map(Grid.of(stage))[:3].tolist()
        labels = stage.as_tensor()[0].contiguous()
        voxels = labels.new_zeros(image.shape[1:])
        h, w = (torch.arange(side, dtype=torch.float64) for side in image.shape[2:])
        for d, plane in enumerate(voxels):  # not axis by axis: Spacing straightens a sheared image (a tilted gantry)
            index, inside = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
            for (by_d, by_h, by_w, shift), side in zip(to_stage, labels.shape, strict=True):
                place = (by_d * d + by_h * h[:, None] + by_w * w + shift + TIE).round().long()
                inside = inside & (place >= 0) & (place < side)
                index = index * side + place.clamp(0, side - 1)
            plane.copy_(labels.flatten()[index] * inside)
        joined = torch.cat([image.as_tensor(), *(voxels[None] == label for label in self.labels)])
        case[self.image] = MetaTensor(joined).copy_meta_from(image)
        return case


_COMPONENTS: dict[str, Callable[..., Any]] = {
    "ClipZScore": ClipZScore,
    "CropForeground": crop_foreground,
    "Orientation": orientation,
    "Pad": Pad,
    PREVIOUS_STAGE: PreviousStage,
    "Spacing": Spacing,
    "ZScore": ZScore,
}
PREPROCESSING = Registry("preprocessing component", _COMPONENTS)
"""Components for ``preprocessing`` in a config. Each takes the case's fields and its own parameters."""
