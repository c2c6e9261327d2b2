"""Which convolutions are computed with channels of zeros: those that were measured to take less time so.

Measured on an H200 as those of ``paired_rules``, 3 x 3 x 3 taps; the time of copying a volume into more channels, by
torch, counts. Channels that zeros are added to behind a convolution cost no copy: its result is a slice. What
``paired`` computes faster, it computes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from volseg.device.convolution.paired_rules import BOTH, LARGE, Case, Direction, find_rule

__all__ = ["RULES", "Filled", "find_filled"]


class Filled(NamedTuple):
    """What was measured of one convolution."""

    inputs: bool
    """Whether its input gets channels of zeros."""
    outputs: bool
    """Whether its output, and that one's gradient, does."""
    fewest: int
    """Voxels of all samples, below which torch computes."""
    share: float
    """Of torch's time, where there were most voxels."""


SMALL = 32**3
"""Voxels, where that was measured alone."""

RULES: Mapping[Direction, Mapping[Case, Filled]] = {
    "forward": {
        (20, 20, 3, 1): Filled(True, True, LARGE, 0.40),
        (24, 24, 3, 1): Filled(True, False, LARGE, 0.54),
        (40, 40, 3, 1): Filled(True, True, LARGE, 0.45),
        (48, 48, 3, 1): Filled(False, True, BOTH, 0.60),
        (96, 48, 3, 1): Filled(False, True, BOTH, 0.53),
        (96, 96, 3, 1): Filled(False, True, SMALL, 0.76),
        (192, 96, 3, 1): Filled(False, True, SMALL, 0.57),
    },
    "input gradient": {
        (20, 20, 3, 1): Filled(False, True, LARGE, 0.54),
        (40, 40, 3, 1): Filled(False, True, LARGE, 0.55),
    },
    "weight gradient": {
        (20, 20, 3, 1): Filled(True, False, LARGE, 0.84),
        (40, 40, 3, 1): Filled(True, False, LARGE, 0.71),
        (48, 48, 3, 1): Filled(True, False, BOTH, 0.74),
    },
}
"""By direction."""


def find_filled(
    direction: Direction, weight: torch.Size, dilation: Sequence[int], voxels: int, device: torch.device
) -> Filled | None:
    """Return which channels are filled up, None where none are; arguments as of ``paired_rules.find_group``."""
    return find_rule(RULES, direction, weight, dilation, voxels, device)
