"""Choose forms of a convolution that torch computes faster, by measured times of the resulting convolution.

cuDNN computes in tiles of channels, and has its own rules for kernels: on an H200, with 3 x 3 x 3 taps, 16 channels
take as long as 32, 24 channels to 80 take twice as long as 32 to 96, and the weight's gradient of 64 channels to 16
takes 290 ms for 128^3 voxels, that of 64 to 32 takes 1. Two forms of a convolution give cuDNN other channels: groups
of voxels along W (``space_to_channels``), and channels of zeros (``padded``).

The time of a form is that of the convolution that cuDNN then computes, from `TABLE` (bfloat16, channels last, 96^3
voxels, recorded by ``workflows/benchmarks/kernel_timings.py table``), plus its copies. Of 372 random convolutions on an
H200 volseg replaced 203, which then took 109 ms instead of 284; one of them took longer than torch's
(``workflows/benchmarks/results/convolutions_h200_random.json``).

A form is used if it saves a tenth of the time. torch computes convolutions outside the table: other channels, other
taps, few voxels, and GPUs of other compute capabilities than 9.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from volseg.device import gpus
from volseg.device.convolution import padded, space_to_channels

Direction = Literal["forward", "input gradient", "weight gradient"]


class Groups(NamedTuple):
    """Convolution over groups of voxels along W: see ``space_to_channels``."""

    voxels: int
    """Voxels of a group: 2 or 4."""


class ZeroChannels(NamedTuple):
    """Convolution with channels of zeros up to cuDNN's next block: see ``padded``."""

    inputs: bool
    """Whether the input gets them."""
    outputs: bool
    """Whether the output, and its gradient, gets them."""


Form: TypeAlias = Groups | ZeroChannels

FORMS: Sequence[Form] = (
    Groups(2),
    Groups(4),
    ZeroChannels(True, False),
    ZeroChannels(False, True),
    ZeroChannels(True, True),
)

TABLE = Path(__file__).with_name("times_h200.json")
"""Picoseconds of torch's convolutions for a voxel, by taps, dilation, direction, and channels in and out."""

CAPABILITY = 9
"""Compute capability of the measured GPUs."""

FEWEST, FEWEST_OF_GROUPS = 2**15, 2**17
"""Voxels of all samples, below which tiles do not fill the GPU and the table does not apply."""

GAIN = 0.9
"""Largest accepted time of a form, relative to torch's."""

COPY_PS = 0.53
"""Picoseconds per byte that a copy reads or writes: 1.9 TB/s."""

OVERHEAD_PS = {Groups: 15e6, ZeroChannels: 12e6}
"""Picoseconds of the kernels that expand or pad the weight, whatever the size of the volume."""

Sides = tuple[int, ...]
Lookup: TypeAlias = Mapping[tuple[Sides, Sides], Mapping[Direction, Mapping[tuple[int, int], int | None]]]


@cache
def load_table() -> Lookup:
    """Return the table: by taps and dilation, by direction, by channels in and out."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return {
        (tuple(row["taps"]), tuple(row["dilation"])): {
            direction: dict(zip(product(row["channels"], repeat=2), chain(*square), strict=True))
            for direction, square in row["picoseconds"].items()
        }
        for row in rows
    }


class ConvolutionShape(NamedTuple):
    """A convolution without strides or groups."""

    direction: Direction
    inputs: int
    outputs: int
    taps: Sides
    dilation: Sides
    voxels: int

    def look_up(self) -> float | None:
        """Return torch's time in picoseconds; None if it was not measured."""
        times = load_table().get((self.taps, self.dilation))
        time = None if times is None else times[self.direction].get((self.inputs, self.outputs))
        return None if time is None else float(time) * self.voxels

    def group(self, voxels: int) -> "ConvolutionShape":
        """Return the convolution over groups of this number of voxels."""
        reach = (self.taps[-1] - 1) // 2 * self.dilation[-1]
        taps = (*self.taps[:2], 2 * space_to_channels.count_groups(reach, voxels) + 1)
        wide = self._replace(inputs=self.inputs * voxels, outputs=self.outputs * voxels, voxels=self.voxels // voxels)
        return wide._replace(taps=taps, dilation=(*self.dilation[:2], 1))


def estimate_time(form: Form | None, convolved: ConvolutionShape) -> float | None:
    """Return the picoseconds of a convolution in a form (None: torch's own); None if the table does not contain it."""
    if form is None:
        return convolved.look_up()
    if isinstance(form, ZeroChannels):
        time = _estimate_zeros(form, convolved)
    else:
        time = _estimate_groups(form.voxels, convolved)
    return None if time is None else time + OVERHEAD_PS[type(form)]


def _estimate_groups(voxels: int, convolved: ConvolutionShape) -> float | None:
    wide = convolved.group(voxels)
    time = wide.look_up()
    # The expanded weight, or its gradient, is written and read.
    return None if time is None else time + 4 * wide.inputs * wide.outputs * prod(wide.taps) * COPY_PS


def _estimate_zeros(form: ZeroChannels, convolved: ConvolutionShape) -> float | None:
    inputs = padded.fill_up(convolved.inputs) if form.inputs else convolved.inputs
    outputs = padded.fill_up(convolved.outputs) if form.outputs else convolved.outputs
    if (inputs != convolved.inputs, outputs != convolved.outputs) != tuple(form):
        return None
    time = convolved._replace(inputs=inputs, outputs=outputs).look_up()
    copied = 0
    if form.inputs and convolved.direction != "input gradient":
        copied += inputs + convolved.inputs
    if form.outputs and convolved.direction != "forward":
        copied += outputs + convolved.outputs
    return None if time is None else time + 2 * copied * convolved.voxels * COPY_PS


def rank_forms(
    direction: Direction, weight: torch.Size, dilation: Sequence[int], voxels: int, device: torch.device
) -> Sequence[Form]:
    """Return the forms of a convolution that are faster than torch's own, the fastest first.

    Parameters
    ----------
    direction : {"forward", "input gradient", "weight gradient"}
    weight : torch.Size
        Shape of the weight.
    dilation : sequence of int
        Along D, H, W.
    voxels : int
        Voxels of the convolved volume, or of the output's gradient, over all samples.
    device : torch.device
        A GPU.
    """
    if not torch.backends.cudnn.enabled or gpus.get_capability(device)[0] != CAPABILITY:
        return ()
    return _rank(direction, tuple(weight), tuple(dilation), voxels)


@cache
def _rank(direction: Direction, weight: Sides, dilation: Sides, voxels: int) -> Sequence[Form]:
    outputs, inputs, *taps = weight
    convolved = ConvolutionShape(direction, inputs, outputs, tuple(taps), dilation, voxels)
    plain = estimate_time(None, convolved)
    if plain is None or voxels < FEWEST:
        return ()
    found = []
    for form in FORMS:
        time = None if isinstance(form, Groups) and voxels < FEWEST_OF_GROUPS else estimate_time(form, convolved)
        if time is not None and time <= GAIN * plain:
            found.append((time, form))
    return [form for _, form in sorted(found, key=lambda pair: pair[0])]
