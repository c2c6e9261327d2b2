"""Which convolutions are computed over pairs or fours of voxels: those that were measured to take less time so.

Measured on an H200 (bf16, one volume, recorded; torch 2.11, cuDNN 9.19), where nothing else was at least a tenth
faster: of 32 channels to 32 with 3 x 3 x 3 taps the weight's gradient wins a third, forward and the input's gradient 4
and 5 %, which expanding the weight takes half of. Nothing is concluded from one number of channels to another: 24 are
slower than 16 and than 32, groups of 64 win with 5 x 5 x 5 taps in one direction of three, and with a dilation of 4
they took up to 26 times as long as torch. Other GPUs than those of compute capability 9 are torch's until measured.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch

from volseg.device import pretended

__all__ = ["BOTH", "LARGE", "RULES", "Case", "Direction", "Rule", "find_group", "find_rule"]

Direction = Literal["forward", "input gradient", "weight gradient"]


class Rule(NamedTuple):
    """What was measured of one convolution."""

    group: int
    """Voxels: 2 or 4."""
    fewest: int
    """Voxels of all samples, below which torch computes."""
    share: float
    """Of torch's time, where there were most voxels; without expanding the weight."""


BOTH = 64**3
"""Voxels, where 64^3 was measured as well as 128^3, or 64^3 alone."""

LARGE = 2**19
"""Where 128^3 alone was measured: a quarter of it, which still gives each processor 30 tiles of 128 voxels."""

Case = tuple[int, int, int, int]
"""Channels in, channels out, sides of the kernel, dilation."""

RULES: Mapping[Direction, Mapping[Case, Rule]] = {
    "forward": {
        (8, 8, 3, 1): Rule(4, LARGE, 0.33),
        (16, 16, 3, 1): Rule(2, BOTH, 0.52),
        (16, 32, 3, 2): Rule(2, LARGE, 0.41),
        (16, 16, 5, 1): Rule(2, LARGE, 0.30),
        (32, 32, 5, 1): Rule(2, BOTH, 0.79),
    },
    "input gradient": {
        (8, 8, 3, 1): Rule(4, LARGE, 0.25),
        (16, 16, 3, 1): Rule(2, BOTH, 0.50),
        (24, 24, 3, 1): Rule(4, LARGE, 0.40),
        (48, 48, 3, 1): Rule(2, LARGE, 0.82),
        (32, 32, 3, 2): Rule(2, LARGE, 0.87),
        (16, 16, 5, 1): Rule(2, LARGE, 0.30),
        (32, 32, 5, 1): Rule(2, BOTH, 0.71),
        (64, 64, 5, 1): Rule(2, BOTH, 0.73),
    },
    "weight gradient": {
        (8, 8, 3, 1): Rule(4, LARGE, 0.51),
        (16, 16, 3, 1): Rule(4, BOTH, 0.55),
        (32, 32, 3, 1): Rule(2, BOTH, 0.66),
        (64, 32, 3, 1): Rule(2, LARGE, 0.67),
        (16, 32, 3, 2): Rule(4, LARGE, 0.61),
        (32, 32, 3, 2): Rule(2, LARGE, 0.66),
        (16, 16, 5, 1): Rule(2, LARGE, 0.59),
        (32, 32, 5, 1): Rule(2, BOTH, 0.81),
    },
}
"""By direction."""

CAPABILITY = 9
"""Of the GPUs that were measured."""


def find_group(
    direction: Direction, weight: torch.Size, dilation: Sequence[int], voxels: int, device: torch.device
) -> int:
    """Return the voxels of a group, 0 where torch's convolution is the faster one, or nobody knows.

    Parameters
    ----------
    direction : {"forward", "input gradient", "weight gradient"}
    weight : torch.Size
        Its shape.
    dilation : sequence of int
        Along D, H, W.
    voxels : int
        Of the volume that is convolved, or of the output's gradient, all samples together.
    device : torch.device
        A GPU.
    """
    rule = find_rule(RULES, direction, weight, dilation, voxels, device)
    return 0 if rule is None else rule.group


class Limited(Protocol):
    """A rule for volumes of so many voxels or more."""

    @property
    def fewest(self) -> int: ...


Found = TypeVar("Found", bound=Limited)


def find_rule(
    rules: Mapping[Direction, Mapping[Case, Found]],
    direction: Direction,
    weight: torch.Size,
    dilation: Sequence[int],
    voxels: int,
    device: torch.device,
) -> Found | None:
    """Return the rule of a convolution, None where there is none for it on this GPU; see ``find_group``."""
    outputs, inputs, *taps = weight
    if len({*taps}) > 1 or len({*dilation}) > 1:
        return None
    rule = rules[direction].get((inputs, outputs, taps[0], dilation[0]))
    if rule is None or voxels < rule.fewest or not torch.backends.cudnn.enabled:
        return None
    return rule if pretended.find_capability(device)[0] == CAPABILITY else None
