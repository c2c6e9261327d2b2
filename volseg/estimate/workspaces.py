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
from functools import cache
from importlib.resources import files
from itertools import product
from math import log2, prod
from typing import Any, Literal

import numpy as np
import torch

__all__ = ["ConvolutionPass", "estimate_workspace"]

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

Size = tuple[int, ...]


def estimate_workspace(
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
    return _find(part, *map(tuple, (first, second, weight)), min(dtype.itemsize, 4), channels_last, strided, transposed)


@cache
def _find(
    part: str,
    first: Size,
    second: Size,
    weight: Size,
    itemsize: int,
    channels_last: bool,
    strided: bool,
    transposed: bool,
) -> int:
    taps, voxels = prod(weight[2:]), first[0] * prod(first[2:])
    table, kind = _read_table(), (itemsize, channels_last, taps == 1, transposed, strided)
    # Of the kinds that were measured that which has most in common with it, the first properties first.
    known = [other for name, other in table if name == part]
    places, measured = table[
        part, max(known, key=lambda other: [one == two for one, two in zip(kind, other, strict=True)])
    ]
    distances = np.abs(places - _place(first[1], second[1], taps, voxels)).sum(axis=1)
    their_first, their_second, their_taps, their_itemsize, taken = measured[int(distances.argmin())]
    theirs = _count_copies(their_first, their_second, (their_first[1], their_second[1], their_taps), their_itemsize)
    own = _count_copies(first, second, weight, itemsize)
    # The copies that leave the smallest rest of what was taken.
    possible = [
        (taken - _sum(copied, theirs), copied) for copied in product((0, 1), repeat=3) if _sum(copied, theirs) <= taken
    ]
    rest, copied = min(possible)
    return _sum(copied, own) + rest


def _sum(copied: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(times * size for times, size in zip(copied, sizes, strict=True))


def _place(inputs: int, outputs: int, taps: int, voxels: int) -> Any:
    """Return coordinates of a convolution, whose differences add up to its distance from another."""
    sizes = (BY_CHANNELS, inputs), (BY_CHANNELS, outputs), (BY_TAPS, taps), (BY_VOXELS, voxels)
    # What cuDNN chooses by.
    aligned = [(few <= 1, few <= 4, few % 4 == 0, few % 8 == 0) for few in (inputs, outputs)]
    return np.array([*(scale * log2(size) for scale, size in sizes), *BY_ALIGNMENT * np.ravel(aligned)])


@cache
def _read_table() -> dict[tuple[str, Kind], tuple[Any, list[tuple[Size, Size, int, int, int]]]]:
    """Return what was measured by pass and kind: coordinates; sizes, taps, bytes of an element, bytes in all."""
    stored = files("volseg.estimate").joinpath("tables", f"{TABLE}.json.gz").read_bytes()
    found: dict[tuple[str, Kind], list[tuple[Size, Size, int, int, int]]] = {}
    for part, first, second, taps, size, last, strided, transposed, taken in json.loads(gzip.decompress(stored)):
        found.setdefault((part, (size, last, taps == 1, transposed, strided)), []).append(
            (first, second, taps, size, taken)
        )
    return {
        key: (np.stack([_place(a[1], b[1], taps, a[0] * prod(a[2:])) for a, b, taps, *_ in rows]), rows)
        for key, rows in found.items()
    }


def _count_copies(first: Sequence[int], second: Sequence[int], weight: Sequence[int], itemsize: int) -> list[int]:
    """Return the bytes of a copy of input, output and weight."""
    volumes = [size[0] * _fill_up(size[1], itemsize) * prod(size[2:]) * itemsize for size in (first, second)]
    return [*volumes, prod(_fill_up(count, itemsize) for count in weight[:2]) * prod(weight[2:]) * itemsize]


def _fill_up(channels: int, itemsize: int) -> int:
    multiple = ALIGNED // itemsize
    return -(-channels // multiple) * multiple
