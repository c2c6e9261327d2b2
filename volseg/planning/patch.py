"""How large a patch and a batch a GPU takes: nnU-Net's rules, pure.

Axes come in any order, the same in all arguments; of axes that are equally long, the last one is shortened first.

The memory of a training is measured by the elements of the network's convolutions' outputs, as nnU-Net counts them. It
compares that count with one that is known to fit: 560 million of its U-Net, at a batch of two, in 8 GB. What a step
takes besides (normalised copies, gradients, workspaces) goes along with it, so only the count is compared. It is
counted for torch's kernels under autocast; this package's own take less.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from volseg.errors import ConfigError
from volseg.models.residual_encoder import DECODER_BLOCKS, ENCODER_BLOCKS
from volseg.models.topology import VNET_MONAI, Topology, leave_out_slices, plan_topology

__all__ = [
    "REFERENCE_BATCH",
    "PatchPlan",
    "count_residual_features",
    "count_unet_features",
    "count_vnet_features",
    "plan_batch",
    "plan_patch",
    "reference_features",
    "smallest_patch",
]

LARGEST_PATCHES = {2: 2048**2, 3: 256**3}
"""Voxels from which nnU-Net begins to shorten, by the number of axes that have more than one."""

SMALLEST_SIDES = (16, 24)
"""Of the axes that are halved, where there are several of them and where there is one."""

Sides = tuple[int, int, int]
Count = Callable[[Sequence[int], Topology], int]
Shape = Callable[[Sequence[float], Sequence[float]], Topology]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPlan:
    """A patch, the network for it, and what that takes."""

    size: Sides
    topology: Topology
    features: int
    """Elements of one patch; see `count_unet_features`."""


def plan_patch(
    spacing: Sequence[float],
    median_shape: Sequence[float],
    count: Count,
    reference: float,
    *,
    shape: Shape = plan_topology,
) -> PatchPlan:
    """Return the largest patch whose network fits, in the proportions of the median case.

    The first patch is a cube (in mm) of 256 ** 3 voxels at this spacing, or a square of 2048 ** 2 where the median case
    has one voxel along an axis, no longer than the median case. Its longest
    axis relative to the median case is shortened until the count is within ``reference``; if that axis can be no
    shorter, the next longest is. Every side is a multiple of the product of the network's strides along it.

    Parameters
    ----------
    spacing, median_shape : sequence of float
        At the target spacing.
    count : callable
        Of a patch and its topology; see `count_unet_features`.
    reference : float
        The count that fits.
    shape : callable
        Gives the network's topology for a patch and its spacing; raises `ConfigError` if there is none.

    Raises
    ------
    ConfigError
        If not even the smallest patch that has a network fits.
    """
    largest = _largest_sides(spacing, median_shape)
    sides = [min(side, median) for side, median in zip(largest, median_shape, strict=True)]
    patch, topology = _fit(_least_sides(sides, spacing, shape), spacing, shape)
    while (features := count(patch, topology)) > reference:
        order = sorted(range(3), key=lambda axis: (patch[axis] / median_shape[axis], axis), reverse=True)
        found = next(filter(None, (_shorten(patch, axis, topology, spacing, shape) for axis in order)), None)
        if found is None:
            raise ConfigError(
                f"no patch fits: {patch} takes {features / 1e6:.0f} million features and {reference / 1e6:.0f} fit the "
                "memory; name a GPU with more of it"
            )
        patch, topology = found
    return PatchPlan(size=patch, topology=topology, features=features)


def _shorten(
    patch: Sides, axis: int, topology: Topology, spacing: Sequence[float], shape: Shape
) -> tuple[Sides, Topology] | None:
    """Return the next smaller patch along an axis, and its network; None if there is none."""
    sides = [*patch]
    sides[axis] = max(patch[axis] - topology.divisors[axis], 2)  # of one voxel it would be another network
    try:
        # The step after this one may be finer: 256 is a multiple of 64, and what follows is 224, not 192.
        sides[axis] = patch[axis] - shape(sides, spacing).divisors[axis]
        return _fit(sides, spacing, shape) if sides[axis] > 1 else None
    except ConfigError:
        return None


def smallest_patch(sides: Sequence[float], spacing: Sequence[float]) -> tuple[Sides, Topology]:
    """Return the smallest sides that hold ``sides`` and that their U-Net takes, and that network."""
    return _fit(_least_sides(sides, spacing, plan_topology), spacing, plan_topology)


def plan_batch(features: int, reference: float, patch_voxels: int, dataset_voxels: float, *, share: float) -> int:
    """Return how many patches a batch has: what fits, at most a share of the data set's voxels, and two at least.

    >>> plan_batch(280_000_000, 560e6, 128**3, 1e9, share=0.05)
    4
    """
    fitting = round(reference / features * REFERENCE_BATCH)
    covering = round(dataset_voxels * share / patch_voxels)
    return max(min(fitting, covering), REFERENCE_BATCH)


def _largest_sides(spacing: Sequence[float], median_shape: Sequence[float]) -> list[int]:
    """Return the sides of a cube or a square (mm) of `LARGEST_PATCHES` voxels; 1 along an axis of one voxel."""
    finest = [1 / mm for mm in leave_out_slices(median_shape, spacing)]
    spanned = [side for side in finest if side]
    scale = (LARGEST_PATCHES[max(len(spanned), 2)] / math.prod(spanned)) ** (1 / len(spanned))
    return [round(side * scale) or 1 for side in finest]


def _least_sides(sides: Sequence[float], spacing: Sequence[float], shape: Shape) -> list[float]:
    """Return the sides from which on there is a U: what is smaller lies in the middle of a patch, with 0 around it."""
    held = list(sides)
    for least in SMALLEST_SIDES:
        try:
            shape(held, spacing)
        except ConfigError:
            mm = leave_out_slices(sides, spacing)
            fine = [length / min(mm) < 2 for length in mm]
            held = [max(side, least) if halved else side for side, halved in zip(sides, fine, strict=True)]
    return held


def _fit(sides: Sequence[float], spacing: Sequence[float], shape: Shape) -> tuple[Sides, Topology]:
    topology = shape(sides, spacing)
    d, h, w = (math.ceil(side / step) * step for side, step in zip(sides, topology.divisors, strict=True))
    return (d, h, w), topology


REFERENCE_BATCH = 2
"""For which the reference counts fit."""

UNET_REFERENCE = (8.0, 560e6)
"""GiB, and elements of nnU-Net's plain U-Net that fit."""

RESIDUAL_REFERENCES = ((8.0, 680e6), (24.0, 2100e6), (40.0, 3600e6))
"""Of its residual encoders M, L and XL."""

VNET_DOWN, VNET_UP = (1, 1, 2, 3, 2), (1, 1, 2, 2)
"""Convolutions of each level on the way down and up, without those that change the grid."""


def reference_features(preset: str, gpu_memory: float, *, is_2d: bool = False) -> float:
    """Return the count that fits ``gpu_memory`` GiB with a batch of two.

    It is in proportion to the memory, from the largest of nnU-Net's own budgets that is not larger. nnU-Net has budgets
    of their own for single slices.

    >>> reference_features("unet", 16.0) / 1e6, reference_features("resenc", 24.0) / 1e6
    (1120.0, 2100.0)
    """
    references = REFERENCES_2D.get(preset, REFERENCES[preset]) if is_2d else REFERENCES[preset]
    memory, count = max((of for of in references if of[0] <= gpu_memory), default=references[0])
    return count * (gpu_memory / memory)


def count_unet_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return what one patch takes in nnU-Net's plain U-Net, MONAI's DynUNet: two convolutions per stage and side."""
    voxels = _voxels_of_stages(patch, topology)
    encoder = sum(2 * filters * count for filters, count in zip(topology.filters, voxels, strict=True))
    return encoder + _count_decoder(voxels, topology, 2, num_outputs)


def count_residual_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return what one patch takes in nnU-Net's U-Net with a residual encoder."""
    voxels = _voxels_of_stages(patch, topology)
    before = topology.filters[0]
    encoder = before * voxels[0]  # the stem
    for stage, (filters, count) in enumerate(zip(topology.filters, voxels, strict=True)):
        projected = filters != before or max(topology.strides[stage]) > 1
        encoder += (2 * ENCODER_BLOCKS[stage] + projected) * filters * count
        before = filters
    return encoder + _count_decoder(voxels, topology, DECODER_BLOCKS, num_outputs)


def count_vnet_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return what one patch takes in the V-Net, whose last two convolutions give a channel per class."""
    elements = [a * b for a, b in zip(topology.filters, _voxels_of_stages(patch, topology), strict=True)]
    down = sum((n + (level > 0)) * elements[level] for level, n in enumerate(VNET_DOWN))  # one changes the grid
    # On the way up half of a level's channels come from below, and are convolved with as many of the skip.
    up = sum((2 * n + 1) * elements[level] for level, n in enumerate(VNET_UP))
    return down + up + 2 * num_outputs * math.prod(patch)


def _voxels_of_stages(patch: Sequence[int], topology: Topology) -> list[int]:
    sides, voxels = list(patch), []
    for stride in topology.strides:
        sides = [side // step for side, step in zip(sides, stride, strict=True)]
        voxels.append(math.prod(sides))
    return voxels


def _count_decoder(voxels: Sequence[int], topology: Topology, convolutions: int, num_outputs: int) -> int:
    """Count an upsampling and some convolutions per stage, and the one head that works outside of training."""
    stages = zip(topology.filters[:-1], voxels[:-1], strict=True)
    return sum((convolutions + 1) * filters * count for filters, count in stages) + num_outputs * voxels[0]


REFERENCES = {
    "unet": (UNET_REFERENCE,),
    "resenc": RESIDUAL_REFERENCES,
    # Two volumes of two classes filled the 8 GB of its authors (Milletari et al., doi:10.1109/3DV.2016.79).
    "vnet": ((8.0, count_vnet_features((128, 128, 64), VNET_MONAI, 2)),),
    "whole": (UNET_REFERENCE,),
}
"""By preset."""

REFERENCES_2D = {
    "unet": ((8.0, 510e6),),
    "resenc": ((8.0, 810e6), (24.0, 2280e6), (40.0, 3360e6)),
    "whole": ((8.0, 510e6),),
}
"""nnU-Net's numbers for a batch of 12, six times as many for a batch of two."""
