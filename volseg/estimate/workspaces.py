"""How much scratch memory cuDNN takes for a convolution: as it took for the most similar one that was measured.

Torch hands cuDNN a block of its own allocator for the time of each call. An H200 was asked for it for thousands of
shapes (cuDNN 9). What it takes has two causes:

- most of cuDNN's kernels read and write volumes with channels last. Where they lie otherwise, or in float32, some of
  input, output and weight are copied there and back, with channels filled up to a multiple of 16 bytes;
- the gradient of a weight is a sum over all voxels. A weight with few channels makes too few tiles to keep the GPU
  busy, so the sum is divided, and each part is kept.

Which of the three are copied, and what comes on top, is cuDNN's choice by shape. It is taken over from the nearest
measured shape of the same kind (pass, precision, layout, kernel of one voxel or more, stride, transposed): the copies
by their names, so that they grow with the volume, and the rest in bytes, which is tens of MiB at most. With
``torch.backends.cudnn.benchmark`` the same blocks were taken. Other kinds of GPU, whose numbers of processors differ,
are taken to do as the H200 does.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2, prod
from typing import Literal

import torch

__all__ = ["ConvolutionPass", "find_workspace"]

ConvolutionPass = Literal["forward", "input_gradient", "weight_gradient"]

ALIGNED = 16
"""Bytes to a multiple of which the channels of a voxel are filled up."""

TABLE = "convolutions_h200"

BY_CHANNELS, BY_TAPS, BY_VOXELS, BY_ALIGNMENT = 2.0, 1.5, 1.0, 2.0
"""What a doubling of channels, of the kernel's voxels and of the volume's counts as distance, and another alignment of
channels. Of four choices tried those by which a measured shape was best foretold by the others: half of them to the
byte, 80 % within 4 % of the volumes' size."""

Kind = tuple[int, bool, bool, bool, bool]
"""Bytes of an element, and whether channels are last, the kernel is one voxel, it is transposed, has a stride."""

Copied = tuple[int, int, int]
"""How often input, output and weight are copied: once or never."""

COPIES: tuple[Copied, ...] = tuple((one, two, three) for one in (0, 1) for two in (0, 1) for three in (0, 1))


@dataclass(frozen=True, slots=True)
class MeasuredConvolution:
    """What was taken for one shape."""

    inputs: int
    """Channels."""
    outputs: int
    voxels: int
    """Of all volumes of the input."""
    taps: int
    """Voxels of the kernel."""
    sizes: tuple[tuple[int, ...], tuple[int, ...], int]
    """Of input and output, (B, C, ...), and bytes of an element."""
    taken: int
    """Bytes in all."""


def find_workspace(
    part: ConvolutionPass,
    first: torch.Size,
    second: torch.Size,
    weight: torch.Size,
    dtype: torch.dtype,
    *,
    channels_last: bool = False,
    strided: bool = False,
    transposed: bool = False,
) -> int:
    """Return the bytes for a convolution, for the gradient of its input, or for that of its weight.

    Parameters
    ----------
    part : str
        Which of the three.
    first, second : torch.Size
        Of input and output, (B, C, ...).
    weight : torch.Size
        Of its weight, (C, C, ...).
    dtype : torch.dtype
        In which it computes.
    channels_last : bool
        Whether volumes lie so in memory.
    strided, transposed : bool
        Whether it has a stride, and is a transposed convolution.
    """
    return _find(part, *map(tuple, (first, second, weight)), dtype.itemsize, channels_last, strided, transposed)


@cache
def _find(
    part: str,
    first: tuple[int, ...],
    second: tuple[int, ...],
    weight: tuple[int, ...],
    itemsize: int,
    channels_last: bool,
    strided: bool,
    transposed: bool,
) -> int:
    itemsize = min(itemsize, 4)  # float64 as float32
    taps, voxels = prod(weight[2:]), first[0] * prod(first[2:])
    others = _list_distances(part, (itemsize, channels_last, taps == 1, transposed, strided), first[1], second[1], taps)
    _, _, nearest = min(
        (by_weight + BY_VOXELS * abs(log2(voxels / other.voxels)) + by_alignment, number, other)
        for number, (by_weight, by_alignment, other) in enumerate(others)
    )
    copied, rest = _explain(nearest)
    sizes = _count_copies(first, second, weight, itemsize)
    return sum(times * size for times, size in zip(copied, sizes, strict=True)) + rest


@cache
def _list_distances(
    part: str, kind: Kind, inputs: int, outputs: int, taps: int
) -> "list[tuple[float, float, MeasuredConvolution]]":
    """Return what was measured of a kind, and how far each is by its weight and by alignment, whatever the volume."""
    found = []
    for other in _find_kind(part, kind):
        channels = (inputs, other.inputs), (outputs, other.outputs)
        by_weight = BY_CHANNELS * sum(abs(log2(one / two)) for one, two in channels)
        by_weight += BY_TAPS * abs(log2(taps / other.taps))
        found.append((by_weight, BY_ALIGNMENT * sum(map(_count_misalignment, channels)), other))
    return found


def _find_kind(part: str, kind: Kind) -> "list[MeasuredConvolution]":
    """Return what was measured of a kind, or of that which has most in common with it, the first properties first."""
    table = _read_table()
    known = [other for name, other in table if name == part]
    nearest = max(known, key=lambda other: [one == two for one, two in zip(kind, other, strict=True)])
    return table[part, nearest]


def _count_misalignment(channels: tuple[int, int]) -> int:
    """Return how many of the properties that cuDNN chooses by differ."""
    return sum((channels[0] <= few) != (channels[1] <= few) for few in (1, 4)) + sum(
        (channels[0] % many == 0) != (channels[1] % many == 0) for many in (4, 8)
    )


@cache
def _read_table() -> dict[tuple[str, Kind], list[MeasuredConvolution]]:
    stored = files("volseg.estimate").joinpath("tables", f"{TABLE}.json.gz").read_bytes()
    found: dict[tuple[str, Kind], list[MeasuredConvolution]] = {}
    for part, first, second, taps, itemsize, channels_last, strided, transposed, taken in json.loads(
        gzip.decompress(stored)
    ):
        voxels, sizes = first[0] * prod(first[2:]), (tuple(first), tuple(second), itemsize)
        one = MeasuredConvolution(first[1], second[1], voxels, taps, sizes, taken)
        found.setdefault((part, (itemsize, channels_last, taps == 1, transposed, strided)), []).append(one)
    return found


@cache
def _explain(measured: MeasuredConvolution) -> tuple[Copied, int]:
    """Return the copies that leave the smallest rest, and that; asked of few of the thousands that were measured."""
    first, second, itemsize = measured.sizes
    taken = measured.taken
    sizes = _count_copies(first, second, [first[1], second[1], measured.taps], itemsize)
    return min(
        (
            (copied, taken - sum(times * size for times, size in zip(copied, sizes, strict=True)))
            for copied in COPIES
            if sum(times * size for times, size in zip(copied, sizes, strict=True)) <= taken
        ),
        key=lambda one: one[1],
    )


def _count_copies(first: Sequence[int], second: Sequence[int], weight: Sequence[int], itemsize: int) -> list[int]:
    """Return the bytes of a copy of input, output and weight."""
    return [_count_volume(first, itemsize), _count_volume(second, itemsize), _count_weight(weight, itemsize)]


def _fill_up(channels: int, itemsize: int) -> int:
    multiple = ALIGNED // itemsize
    return -(-channels // multiple) * multiple


def _count_volume(size: Sequence[int], itemsize: int) -> int:
    return size[0] * _fill_up(size[1], itemsize) * prod(size[2:]) * itemsize


def _count_weight(size: Sequence[int], itemsize: int) -> int:
    return prod(_fill_up(count, itemsize) for count in size[:2]) * prod(size[2:]) * itemsize
