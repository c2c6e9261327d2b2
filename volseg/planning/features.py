"""How much memory a network takes in training: the elements of its convolutions' outputs, counted as nnU-Net does.

nnU-Net compares that count with one that is known to fit: 560 million of its U-Net, at a batch of two, in 8 GB. What a
step takes besides (normalised copies, gradients, workspaces) goes along with it, so the count alone is compared. It is
counted for torch's kernels under autocast; this package's own take less.
"""

import math
from collections.abc import Sequence

from volseg.models.residual_encoder import DECODER_BLOCKS, ENCODER_BLOCKS
from volseg.models.topology import VNET_MONAI, Topology

__all__ = [
    "REFERENCE_BATCH",
    "count_residual_features",
    "count_unet_features",
    "count_vnet_features",
    "reference_features",
]

REFERENCE_BATCH = 2
"""For which the reference counts fit."""

UNET_REFERENCE = (8.0, 560e6)
"""GiB, and elements of nnU-Net's plain U-Net that fit."""

RESIDUAL_REFERENCES = ((8.0, 680e6), (24.0, 2100e6), (40.0, 3600e6))
"""Of its residual encoders M, L and XL."""

VNET_DOWN, VNET_UP = (1, 1, 2, 3, 2), (1, 1, 2, 2)
"""Convolutions of each level on the way down and up, without those that change the grid."""


def reference_features(preset: str, gpu_memory: float) -> float:
    """Return the count that fits ``gpu_memory`` GiB with a batch of two.

    It is in proportion to the memory, from the largest of nnU-Net's own budgets that is not larger.

    >>> reference_features("unet", 16.0) / 1e6, reference_features("resenc", 24.0) / 1e6
    (1120.0, 2100.0)
    """
    references = REFERENCES[preset]
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
