"""Compute the patch and the batch that fit a GPU, by nnU-Net's rules and without side effects.

Axes may have any order, the same in all arguments. Of axes that are equally long, the last is shortened first.

The memory of a training is measured by the elements of the outputs of the network's convolutions, as nnU-Net counts
them. nnU-Net compares that count with one that is known to fit: 560 million for its U-Net, at a batch of two, in 8 GB.
The other memory of a step (normalised copies, gradients, workspaces) grows with the count, so only the count is
compared. The count is for torch's kernels under autocast; this package's own kernels take less.
"""

import math
from collections.abc import Callable, Sequence

from volseg.errors import ConfigError
from volseg.models.residual_encoder import DECODER_BLOCKS, ENCODER_BLOCKS
from volseg.models.topology import VNET_MONAI, Topology, leave_out_slices, plan_topology

LARGEST_PATCHES = {2: 2048**2, 3: 256**3}
"""Voxels of the first patch, by the number of axes with more than one voxel."""

SMALLEST_SIDES = (16, 24)
"""Shortest sides of the halved axes: if more than one axis is halved, and if only one is."""

Sides = tuple[int, int, int]
Count = Callable[[Sequence[int], Topology], int]
Shape = Callable[[Sequence[float], Sequence[float]], Topology]


def plan_patch(
    spacing: Sequence[float],
    median_shape: Sequence[float],
    count: Count,
    reference: float,
    *,
    shape: Shape = plan_topology,
) -> tuple[Sides, Topology, int]:
    """Return the largest patch that fits, in the proportions of the median case, its network, and its feature count.

    The first patch is a cube (in mm) of 256 ** 3 voxels at this spacing, or a square of 2048 ** 2 if the median case
    has one voxel along an axis. No side is longer than the median case's. The axis that is longest relative to the
    median case is shortened until the count is within ``reference``. If that axis cannot be shorter, the next longest
    is shortened. Every side is a multiple of the product of the network's strides along it.

    Parameters
    ----------
    spacing, median_shape : sequence of float
        Those of the data set, at the target spacing.
    count : callable
        Counts the features of a patch and its topology; see `count_unet_features`.
    reference : float
        The count that fits.
    shape : callable
        Returns the network's topology for a patch and its spacing; raises `ConfigError` if there is none.

    Raises
    ------
    ConfigError
        If even the smallest patch with a network does not fit.
    """
    largest = _largest_sides(spacing, median_shape)
    sides = [min(side, median) for side, median in zip(largest, median_shape, strict=True)]
    patch, topology = _fit(_least_sides(sides, spacing, shape), spacing, shape)
    while (features := count(patch, topology)) > reference:
        order = sorted(range(3), key=lambda axis: (patch[axis] / median_shape[axis], axis), reverse=True)
        found = next(filter(None, (_shorten(patch, axis, topology, spacing, shape) for axis in order)), None)
        if found is None:
            raise ConfigError(
                f"no patch fits: {patch} needs {features / 1e6:.0f} million features, but the memory is enough for "
                f"{reference / 1e6:.0f} million; plan for a GPU with more memory (--gpu-memory)"
            )
        patch, topology = found
    return patch, topology, features


def _shorten(
    patch: Sides, axis: int, topology: Topology, spacing: Sequence[float], shape: Shape
) -> tuple[Sides, Topology] | None:
    """Return the next smaller patch along an axis, and its network, or None."""
    sides = [*patch]
    sides[axis] = max(patch[axis] - topology.divisors[axis], 2)  # a side of one voxel would need another network
    try:
        # The step after this one may be finer: 256 is a multiple of 64, and the next side is 224, not 192.
        sides[axis] = patch[axis] - shape(sides, spacing).divisors[axis]
        return _fit(sides, spacing, shape) if sides[axis] > 1 else None
    except ConfigError:
        return None


def smallest_patch(sides: Sequence[float], spacing: Sequence[float]) -> tuple[Sides, Topology]:
    """Return the smallest sides not below ``sides`` that fit a U-Net, and that U-Net."""
    return _fit(_least_sides(sides, spacing, plan_topology), spacing, plan_topology)


def plan_batch(features: int, reference: float, patch_voxels: int, dataset_voxels: float, *, share: float) -> int:
    """Return the patches per batch: as many as fit, at most a share of the data set's voxels, and at least two.

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
    """Return the smallest sides that have a U-Net; a smaller case is centred in a patch and padded with 0."""
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
"""Batch for which the reference counts fit."""

UNET_REFERENCE = (8.0, 560e6)
"""GPU memory (GiB), and the elements of nnU-Net's plain U-Net that fit."""

RESIDUAL_REFERENCES = ((8.0, 680e6), (24.0, 2100e6), (40.0, 3600e6))
"""The same numbers for nnU-Net's residual encoders M, L and XL."""

VNET_DOWN, VNET_UP = (1, 1, 2, 3, 2), (1, 1, 2, 2)
"""Convolutions of each level on the way down and up, without those that change the grid."""


def reference_features(preset: str, gpu_memory: float, *, is_2d: bool = False) -> float:
    """Return the count that fits ``gpu_memory`` GiB with a batch of two.

    The count is nnU-Net's largest budget for at most that memory, scaled in proportion to the memory. nnU-Net has
    separate budgets for single slices.

    >>> reference_features("unet", 16.0) / 1e6, reference_features("resenc", 24.0) / 1e6
    (1120.0, 2100.0)
    """
    references = REFERENCES_2D.get(preset, REFERENCES[preset]) if is_2d else REFERENCES[preset]
    memory, count = max((of for of in references if of[0] <= gpu_memory), default=references[0])
    return count * (gpu_memory / memory)


def count_unet_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return the features of a patch in nnU-Net's plain U-Net, MONAI's DynUNet: two convolutions per stage and side."""
    voxels = _voxels_of_stages(patch, topology)
    encoder = sum(2 * filters * count for filters, count in zip(topology.filters, voxels, strict=True))
    return encoder + _count_decoder(voxels, topology, 2, num_outputs)


def count_residual_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return the features of one patch in nnU-Net's U-Net with a residual encoder."""
    voxels = _voxels_of_stages(patch, topology)
    before = topology.filters[0]
    encoder = before * voxels[0]  # the stem
    for stage, (filters, count) in enumerate(zip(topology.filters, voxels, strict=True)):
        projected = filters != before or max(topology.strides[stage]) > 1
        encoder += (2 * ENCODER_BLOCKS[stage] + projected) * filters * count
        before = filters
    return encoder + _count_decoder(voxels, topology, DECODER_BLOCKS, num_outputs)


def count_vnet_features(patch: Sequence[int], topology: Topology, num_outputs: int) -> int:
    """Return the features of one patch in the V-Net; its last two convolutions output a channel per class."""
    elements = [a * b for a, b in zip(topology.filters, _voxels_of_stages(patch, topology), strict=True)]
    down = sum((n + (level > 0)) * elements[level] for level, n in enumerate(VNET_DOWN))  # one changes the grid
    # On the way up half of a level's channels come from below, and are convolved together with as many of the skip.
    up = sum((2 * n + 1) * elements[level] for level, n in enumerate(VNET_UP))
    return down + up + 2 * num_outputs * math.prod(patch)


def _voxels_of_stages(patch: Sequence[int], topology: Topology) -> list[int]:
    sides, voxels = list(patch), []
    for stride in topology.strides:
        sides = [side // step for side, step in zip(sides, stride, strict=True)]
        voxels.append(math.prod(sides))
    return voxels


def _count_decoder(voxels: Sequence[int], topology: Topology, convolutions: int, num_outputs: int) -> int:
    """Count one upsampling and the convolutions of each stage, and the one head that also runs in inference."""
    stages = zip(topology.filters[:-1], voxels[:-1], strict=True)
    return sum((convolutions + 1) * filters * count for filters, count in stages) + num_outputs * voxels[0]


REFERENCES = {
    "unet": (UNET_REFERENCE,),
    "resenc": RESIDUAL_REFERENCES,
    # Two volumes of two classes filled the 8 GB of its authors (Milletari et al., doi:10.1109/3DV.2016.79).
    "vnet": ((8.0, count_vnet_features((128, 128, 64), VNET_MONAI, 2)),),
    "whole": (UNET_REFERENCE,),
}
"""GPU memory (GiB) and count that fit, by preset."""

REFERENCES_2D = {
    "unet": ((8.0, 510e6),),
    "resenc": ((8.0, 810e6), (24.0, 2280e6), (40.0, 3360e6)),
    "whole": ((8.0, 510e6),),
}
"""nnU-Net's counts at its batch of 12, times six for a batch of two."""
