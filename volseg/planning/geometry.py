"""Plan the spacing, the patch, the batch and the network's shape of a task, without side effects.

nnU-Net orders axes as its reader does (slices first, as in ``(z, y, x)``) and puts the coarsest axis in front.
Its rules break ties by that order, so they are applied in that order here. The results are along D, H, W again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from volseg.errors import ConfigError
from volseg.models.topology import Topology, is_thin, plan_topology, plan_vnet_topology
from volseg.planning.fingerprint import Fingerprint
from volseg.planning.patch import (
    REFERENCE_BATCH,
    count_residual_features,
    count_unet_features,
    count_vnet_features,
    plan_batch,
    plan_patch,
    reference_features,
    smallest_patch,
)
from volseg.transforms.grid import ANISOTROPY

PRESETS = {
    "unet": "nnU-Net's plain U-Net",
    "resenc": "nnU-Net's U-Net with a residual encoder",
    "vnet": "the V-Net of Milletari et al.",
    "whole": "the plain U-Net on whole volumes, cut over GPUs",
}

CASCADE_BELOW = 0.25
"""Share of the median case in a patch below which nnU-Net plans a low-resolution network too."""

LARGEST_SHARE = {"unet": 0.05, "resenc": 1.0, "vnet": 0.05, "whole": 0.05}
"""Largest share of the data set's voxels in one batch; nnU-Net's planners of residual encoders allow all of them."""

COUNTS = {"unet": count_unet_features, "resenc": count_residual_features, "vnet": count_vnet_features}
"""Function that counts the features of a patch, by the preset that cuts patches."""

THINNEST_SLAB = 8
"""Fewest planes of a volume per GPU, if the volume is cut."""

Sides = tuple[int, int, int]
Lengths = tuple[float, float, float]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of a plan along D, H, W."""

    spacing: Lengths
    """Spacing to which all cases are resampled (mm)."""
    spacing_rule: str
    median_shape: Lengths
    """Median of the cases' shapes at that spacing (voxels)."""
    largest_shape: Sides
    """Largest side of the cases along each single axis."""
    voxels: float
    """Voxels of the whole data set, if each case were as large as the median."""
    coarse: int
    """The axis of the largest spacing, or the axis of one voxel."""
    patch: Sides
    batch: int
    topology: Topology | None = None
    """None for the network of a trained model."""
    features: int = 0
    """Features of one patch; see `volseg.planning.patch`."""
    reference: float = 0.0
    """Features per patch that fit, with a batch of two."""
    num_gpus: int = 1
    """GPUs that share each volume."""
    axcodes: str = "RAS"
    """Directions in the patient to which D, H, W point."""

    @property
    def is_2d(self) -> bool:
        """Whether the median case has one voxel along an axis: nnU-Net plans no 3D network for it."""
        return min(self.median_shape) == 1


def plan_geometry(
    fingerprint: Fingerprint, preset: str, gpu_memory: float, *, at: tuple[Sequence[float], str] | None = None
) -> Geometry:
    """Apply the rules for spacing, patch, network and batch.

    Parameters
    ----------
    fingerprint : Fingerprint
        Fingerprint of the data set.
    preset : str
        A key of `PRESETS`.
    gpu_memory : float
        Memory of one GPU (GiB).
    at : tuple, optional
        A spacing along D, H, W (mm) and its reason, in place of the rule for the spacing.

    Raises
    ------
    ConfigError
        If no patch or volume fits the memory.
    """
    spacings = [case.spacing[::-1] for case in fingerprint.cases]
    shapes = [case.shape[::-1] for case in fingerprint.cases]
    target, rule = plan_spacing(spacings, shapes) if at is None else (np.asarray(at[0])[::-1], at[1])
    resampled = np.array([resampled_shape(*case, target) for case in zip(shapes, spacings, strict=True)])
    median = np.median(resampled, 0)
    is_2d = median.min() == 1
    coarse = int(np.argmin(median) if is_2d else np.argmax(target))
    order = [coarse, *(axis for axis in range(3) if axis != coarse)]
    mm, sides = [float(target[axis]) for axis in order], [float(median[axis]) for axis in order]
    largest = [int(resampled[:, axis].max()) for axis in order]
    voxels = math.prod(sides) * len(fingerprint.cases)
    reference = reference_features(preset, gpu_memory, is_2d=is_2d)
    num_outputs = count_outputs(fingerprint)
    if preset == "whole":
        patch, topology = smallest_patch(largest, mm)
        features = count_unet_features(patch, topology, num_outputs)
    else:
        count = COUNTS[preset]
        shape = partial(plan_vnet_topology, thin=is_thin(sides)) if preset == "vnet" else plan_topology
        # nnU-Net's planners of residual encoders shorten a slice until its whole reference batch of 12 fits.
        limit = reference / 6 if is_2d and preset == "resenc" else reference
        patch, topology, features = plan_patch(
            mm, sides, lambda patch, topology: count(patch, topology, num_outputs), limit, shape=shape
        )
    num_gpus = _count_gpus(features, reference, patch, gpu_memory) if preset == "whole" else 1
    share = LARGEST_SHARE[preset]
    batch = 1 if num_gpus > 1 else plan_batch(features, reference, math.prod(patch), voxels, share=share)
    back = [order.index(2 - axis) for axis in range(3)]  # from nnU-Net's order to D, H, W
    return Geometry(
        spacing=_pick(mm, back),
        spacing_rule=rule,
        median_shape=_pick(sides, back),
        largest_shape=_pick(largest, back),
        voxels=voxels,
        coarse=2 - coarse,
        patch=_pick(patch, back),
        batch=batch,
        topology=turn_topology(topology, back),
        features=features,
        reference=reference,
        num_gpus=num_gpus,
    )


def plan_low_resolution(fingerprint: Fingerprint, fine: Geometry, gpu_memory: float) -> Geometry:
    """Return the geometry of the first stage of nnU-Net's cascade; its second stage is ``fine``.

    The spacing grows by 3 % at a time, until a patch covers a quarter of the median case. It grows only along axes
    finer than half the coarsest spacing, while there are such axes.

    Raises
    ------
    ConfigError
        If a patch of ``fine`` covers a quarter, or the coarser grid has more than half as many voxels.
    """
    whole, mm, low = math.prod(fine.median_shape), np.array(fine.spacing), fine
    rule = f"coarser, until a patch covers {CASCADE_BELOW:.0%} of the median case: nnU-Net's first stage of a cascade"
    while math.prod(low.patch) < CASCADE_BELOW * math.prod(low.median_shape):
        is_fine = mm.max() > 2 * mm
        mm[is_fine if is_fine.any() else slice(None)] *= 1.03
        low = plan_geometry(fingerprint, "unet", gpu_memory, at=(mm.tolist(), rule))
    if low is fine or 2 * math.prod(low.median_shape) > whole:
        raise ConfigError(
            f"a patch of {'x'.join(map(str, fine.patch))} voxels covers {math.prod(fine.patch) / whole:.0%} of the "
            "median case: nnU-Net plans no cascade, as a coarser network would see hardly more; choose the preset unet"
        )
    return low


def count_outputs(fingerprint: Fingerprint) -> int:
    """Return the number of labels that nnU-Net counts: its ``labels``, with the background and the ignored label."""
    told_apart = len(fingerprint.regions) + 1 if fingerprint.regions else len(fingerprint.labels)
    return told_apart + (fingerprint.ignore is not None)


def turn_topology(topology: Topology, axes: Sequence[int]) -> Topology:
    """Return a network's shape with its axes in another order."""
    strides, kernels = (tuple(_pick(of, axes) for of in each) for each in (topology.strides, topology.kernels))
    return Topology(strides=strides, kernels=kernels, filters=topology.filters)


def _pick(values: Sequence[Item], axes: Sequence[int]) -> tuple[Item, Item, Item]:
    d, h, w = (values[axis] for axis in axes)
    return d, h, w


def _count_gpus(features: int, reference: float, volume: Sequence[int], gpu_memory: float) -> int:
    """Return the number of GPUs over which one volume is cut so that each part fits."""
    needed = math.ceil(features / (REFERENCE_BATCH * reference))
    most = max(volume) // THINNEST_SLAB
    if needed > max(most, 1):
        raise ConfigError(
            f"whole volumes of {'x'.join(map(str, volume))} voxels need {needed} GPUs of {gpu_memory:g} GiB, but can "
            f"be cut into only {most} slabs; plan for GPUs with more memory (--gpu-memory), or choose another preset"
        )
    return needed


Floats = NDArray[np.float64]


def plan_spacing(spacings: Sequence[Sequence[float]], shapes: Sequence[Sequence[int]]) -> tuple[Floats, str]:
    """Return the spacing (mm) to which all cases are resampled, and the reason.

    The spacing is the median along each axis. An axis with more than three times the spacing of the others and less
    than a third of their voxels gets its tenth percentile: the median would discard slices of the cases with many
    slices.

    Parameters
    ----------
    spacings, shapes : sequences
        Those of each case, after cropping to the voxels that are not 0.

    References
    ----------
    .. [1] F. Isensee et al., "nnU-Net", Nature Methods 18, 2021, supplement, doi:10.1038/s41592-020-01008-z.
    """
    mm, sides = np.asarray(spacings, dtype=np.float64), np.asarray(shapes, dtype=np.float64)
    target, size = np.percentile(mm, 50, 0), np.percentile(sides, 50, 0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != worst]
    finer = max(target[others])
    thick = target[worst] > ANISOTROPY * finer
    few = size[worst] * ANISOTROPY < min(size[others])
    if not (thick and few):
        return target, "median of the cases along each axis"
    tenth = float(np.percentile(mm[:, worst], 10))
    # Slightly coarser than the other axes, so that the axis stays the coarsest.
    target[worst] = tenth if tenth >= finer else finer + 1e-5
    return target, (
        f"median of the cases, except for thick slices ({np.percentile(mm[:, worst], 50):.4g} mm, more than 3 times "
        "the others, and less than a third of their voxels), which get the tenth percentile"
    )


def resampled_shape(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float] | Floats) -> list[int]:
    """Return the number of voxels of a case along each axis at the target spacing."""
    return [round(side / to * count) for side, to, count in zip(spacing, target, shape, strict=True)]


def is_flat(patch: Sequence[int], coarse: int) -> bool:
    """Return whether a patch is so short along its coarsest axis that it is augmented as a stack of planes.

    >>> is_flat((320, 256, 20), 2), is_flat((40, 56, 40), 0)
    (True, False)
    """
    return max(patch) / patch[coarse] > ANISOTROPY


SAME_AXIS = str.maketrans("LPI", "RAS")

PRESETS_OF = {"VNet": "vnet", "ResEncUNet": "resenc"}
"""Preset whose learning rate a network gets; `unet` for any other network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Like:
    """Values of a trained network that a plan uses."""

    source: str
    """Path of the initial weights."""
    network: Mapping[str, Any]
    """Name and all parameters."""
    patch: Sequence[int]
    batch: int
    spacing: Sequence[float]
    """Voxel sides (mm) along the axes of the network."""
    axcodes: str = "RAS"
    """Directions in the patient to which these axes point."""

    @property
    def preset(self) -> str:
        """The preset whose other settings suit the network."""
        return PRESETS_OF.get(str(self.network.get("name")), "unet")


def plan_geometry_like(fingerprint: Fingerprint, like: Like) -> Geometry:
    """Return the sizes of a data set at the spacing of a trained network, in the order of its axes.

    The intensities are those of the data set, since its channels may be of another kind.
    """
    axes = ["RAS".index(letter) for letter in like.axcodes.translate(SAME_AXIS)]
    shapes = [
        resampled_shape([case.shape[axis] for axis in axes], [case.spacing[axis] for axis in axes], like.spacing)
        for case in fingerprint.cases
    ]
    median = [float(side) for side in np.median(shapes, 0)]
    a, b, c = (float(mm) for mm in like.spacing)
    patch, largest = ((int(d), int(h), int(w)) for d, h, w in (like.patch, np.max(shapes, 0)))
    return Geometry(
        spacing=(a, b, c),
        spacing_rule=f"that of {like.source}, at which its weights were trained",
        median_shape=(median[0], median[1], median[2]),
        largest_shape=largest,
        voxels=math.prod(median) * len(shapes),
        coarse=int(np.argmax(like.spacing)),
        patch=patch,
        batch=like.batch,
        axcodes=like.axcodes,
    )
