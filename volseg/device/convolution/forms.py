"""Convolutions that torch computes faster in another form, as measured.

The forms: over groups of voxels, pairs or fours (``space_to_channels``), or with zero channels (``padded``). Measured
on an H200 (bf16, one volume, recorded; torch 2.11, cuDNN 9.19), where nothing else was at least a tenth faster: of 32
channels to 32 with 3 x 3 x 3 taps the weight's gradient gains a third over pairs, forward and the input's gradient 4
and 5 %, half of which expanding the weight takes. For zero channels the time of copying a volume into more channels,
by torch, is included; channels added after a convolution cost no copy: its result is a slice.

Forward and the input's gradient may be computed as one another (``flipped_weights``). With 5 x 5 x 5 taps on an H100
(workflows/benchmarks/results/convolution_h100_turned.json) 64 channels to 64 take 0.75 to 0.89 of torch's time forward,
as an input's gradient over pairs; the input's gradient of 32 channels 0.69 to 0.75, as a forward one over pairs, and
0.71 to 0.87 over pairs without being turned round.

Results do not transfer from one number of channels to another: 24 are slower than 16 and than 32, groups of 64 win with
5 x 5 x 5 taps in one direction of three, and with a dilation of 4 they took up to 26 times as long as torch. GPUs of
other compute capabilities than 9 use torch until measured.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from volseg.device import gpus

__all__ = [
    "BOTH",
    "LARGE",
    "RULES",
    "SMALL",
    "Case",
    "Direction",
    "Form",
    "Groups",
    "Rule",
    "Turned",
    "ZeroChannels",
    "find_form",
]

Direction = Literal["forward", "input gradient", "weight gradient"]


class Groups(NamedTuple):
    """Over groups of voxels along W: see ``space_to_channels``."""

    voxels: int
    """Of a group: 2 or 4."""


class ZeroChannels(NamedTuple):
    """With channels of zeros up to cuDNN's next block: see ``padded``."""

    inputs: bool
    """Whether its input gets them."""
    outputs: bool
    """Whether its output, and that one's gradient, does."""


class Turned(NamedTuple):
    """As the input's gradient of another convolution, or the other way round: see ``flipped_weights``."""

    voxels: int = 1
    """Of a group along W besides; 1 for none."""


Form: TypeAlias = Groups | ZeroChannels | Turned


class Rule(NamedTuple):
    """What was measured of one convolution."""

    form: Form
    fewest: int
    """Voxels of all samples, below which torch computes as it would."""
    share: float
    """Of torch's time, where there were most voxels; without expanding the weight of groups."""


SMALL = 32**3
"""Voxels, if only that size was measured."""

BOTH = 64**3
"""If 64^3 was measured, with or without 128^3."""

LARGE = 2**19
"""If only 128^3 was measured: a quarter of it, which still gives each multiprocessor 30 tiles of 128 voxels."""

Case = tuple[int, int, int, int]
"""Channels in, channels out, sides of the kernel, dilation."""

PAIRS, FOURS = Groups(2), Groups(4)
TURNED_PAIRS = Turned(2)
IN, OUT, AROUND = ZeroChannels(True, False), ZeroChannels(False, True), ZeroChannels(True, True)

RULES: Mapping[Direction, Mapping[Case, Rule]] = {
    "forward": {
        (8, 8, 3, 1): Rule(FOURS, LARGE, 0.33),
        (16, 16, 3, 1): Rule(PAIRS, BOTH, 0.52),
        (16, 32, 3, 2): Rule(PAIRS, LARGE, 0.41),
        (16, 16, 5, 1): Rule(PAIRS, LARGE, 0.30),
        (32, 32, 5, 1): Rule(PAIRS, BOTH, 0.79),
        (64, 64, 5, 1): Rule(TURNED_PAIRS, 2**17, 0.81),
        (20, 20, 3, 1): Rule(AROUND, LARGE, 0.40),
        (24, 24, 3, 1): Rule(IN, LARGE, 0.54),
        (40, 40, 3, 1): Rule(AROUND, LARGE, 0.45),
        (48, 48, 3, 1): Rule(OUT, BOTH, 0.60),
        (96, 48, 3, 1): Rule(OUT, BOTH, 0.53),
        (96, 96, 3, 1): Rule(OUT, SMALL, 0.76),
        (192, 96, 3, 1): Rule(OUT, SMALL, 0.57),
    },
    "input gradient": {
        (8, 8, 3, 1): Rule(FOURS, LARGE, 0.25),
        (16, 16, 3, 1): Rule(PAIRS, BOTH, 0.50),
        (24, 24, 3, 1): Rule(FOURS, LARGE, 0.40),
        (48, 48, 3, 1): Rule(PAIRS, LARGE, 0.82),
        (32, 32, 3, 2): Rule(PAIRS, LARGE, 0.87),
        (16, 16, 5, 1): Rule(PAIRS, LARGE, 0.30),
        (32, 32, 5, 1): Rule(TURNED_PAIRS, BOTH, 0.71),
        (64, 64, 5, 1): Rule(PAIRS, 2**17, 0.73),
        (20, 20, 3, 1): Rule(OUT, LARGE, 0.54),
        (40, 40, 3, 1): Rule(OUT, LARGE, 0.55),
    },
    "weight gradient": {
        (8, 8, 3, 1): Rule(FOURS, LARGE, 0.51),
        (16, 16, 3, 1): Rule(FOURS, BOTH, 0.55),
        (32, 32, 3, 1): Rule(PAIRS, BOTH, 0.66),
        (64, 32, 3, 1): Rule(PAIRS, LARGE, 0.67),
        (16, 32, 3, 2): Rule(FOURS, LARGE, 0.61),
        (32, 32, 3, 2): Rule(PAIRS, LARGE, 0.66),
        (16, 16, 5, 1): Rule(PAIRS, LARGE, 0.59),
        (20, 20, 3, 1): Rule(IN, LARGE, 0.84),
        (40, 40, 3, 1): Rule(IN, LARGE, 0.71),
        (48, 48, 3, 1): Rule(IN, BOTH, 0.74),
    },
}
"""By direction; of a case whose rows cannot be grouped torch computes as it would."""

CAPABILITY = 9
"""Of the GPUs that were measured."""


def find_form(
    direction: Direction, weight: torch.Size, dilation: Sequence[int], voxels: int, device: torch.device
) -> Form | None:
    """Return the faster form of a convolution; None if torch's own is faster, or nothing was measured.

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
    outputs, inputs, *taps = weight
    if len({*taps}) > 1 or len({*dilation}) > 1:
        return None
    rule = RULES[direction].get((inputs, outputs, taps[0], dilation[0]))
    if rule is None or voxels < rule.fewest or not torch.backends.cudnn.enabled:
        return None
    return rule.form if gpus.find_capability(device)[0] == CAPABILITY else None
