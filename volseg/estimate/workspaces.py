"""Estimate cuDNN's workspace for a convolution from the most similar measured convolution.

Torch gives cuDNN a block of its own allocator for the time of each call. These blocks were measured on an H200 for
thousands of shapes (cuDNN 9). They have two causes:

- Most of cuDNN's kernels read and write volumes with channels last. In another layout, or in float32, some of input,
  output and weight are copied there and back, with channels padded to a multiple of 16 bytes.
- The gradient of a weight is a sum over all voxels. A weight with few channels makes too few tiles to keep the GPU
  busy, so cuDNN splits the sum, and stores each part.

cuDNN chooses by shape which of the three tensors are copied, and how much memory is added. The estimate copies this
choice from the nearest measured shape of the same kind (pass, precision, layout, kernel of one voxel or more, stride,
transposed): the same tensors, so that their copies grow with the volume, and the same rest in bytes, which is tens of
MiB at most. ``torch.backends.cudnn.benchmark`` did not change the blocks. Other kinds of GPU, whose numbers of
processors differ, are assumed to behave as the H200 does.
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

ConvolutionPass = Literal["forward", "input_gradient", "weight_gradient"]

ALIGNED = 16
"""The channels of a voxel are padded to a multiple of this many bytes."""

TABLE = "convolutions_h200"

BY_CHANNELS, BY_TAPS, BY_VOXELS, BY_ALIGNMENT = 2.0, 1.5, 1.0, 2.0
"""Distances of a doubling of channels, of the kernel's voxels and of the volume's voxels, and of another alignment of
channels. Of four choices tried, this one predicted measured shapes best from the others: half of them to the byte, 80 %
within 4 % of the volumes' size."""

Kind = tuple[int, bool, bool, bool, bool]
"""Bytes of an element; whether channels are last, the kernel is one voxel, it is transposed, and it has a stride."""

Size = tuple[int, ...]


@cache
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
    """Return the bytes of cuDNN's workspace for a convolution, or for the gradient of its input or its weight.

    Parameters
    ----------
    part : str
        Which of the three passes.
    first, second : torch.Size
        Sizes of input and output, (B, C, ...).
    weight : torch.Size
        Size of the weight, (C, C, ...).
    dtype : torch.dtype
        Type in which the convolution computes.
    channels_last : bool
        Whether the volumes have their channels last in memory.
    strided, transposed : bool
        Whether the convolution has a stride, and whether it is transposed.
    """
    taps, voxels, itemsize = prod(weight[2:]), first[0] * prod(first[2:]), min(dtype.itemsize, 4)
    table, kind = _read_table(), (itemsize, channels_last, taps == 1, transposed, strided)
    # The measured kind that agrees best; earlier properties have priority.
    known = [other for name, other in table if name == part]
    places, measured = table[
        part, max(known, key=lambda other: [one == two for one, two in zip(kind, other, strict=True)])
    ]
    distances = np.abs(places - _place(first[1], second[1], taps, voxels)).sum(axis=1)
    their_first, their_second, their_taps, their_itemsize, taken = measured[int(distances.argmin())]
    theirs = _count_copies(their_first, their_second, (their_first[1], their_second[1], their_taps), their_itemsize)
    own = _count_copies(first, second, weight, itemsize)
    # The choice of copies that leaves the smallest rest of the measured bytes.
    possible = [
        (taken - _sum(copied, theirs), copied) for copied in product((0, 1), repeat=3) if _sum(copied, theirs) <= taken
    ]
    rest, copied = min(possible)
    return _sum(copied, own) + rest


def _sum(copied: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(times * size for times, size in zip(copied, sizes, strict=True))


def _place(inputs: int, outputs: int, taps: int, voxels: int) -> Any:
    """Return the coordinates of a convolution; distances are sums of absolute differences."""
    sizes = (BY_CHANNELS, inputs), (BY_CHANNELS, outputs), (BY_TAPS, taps), (BY_VOXELS, voxels)
    # Properties by which cuDNN chooses.
    aligned = [(few <= 1, few <= 4, few % 4 == 0, few % 8 == 0) for few in (inputs, outputs)]
    return np.array([*(scale * log2(size) for scale, size in sizes), *BY_ALIGNMENT * np.ravel(aligned)])


@cache
def _read_table() -> dict[tuple[str, Kind], tuple[Any, list[tuple[Size, Size, int, int, int]]]]:
    """Return measurements by pass and kind: coordinates; sizes, taps, bytes of an element, bytes of the workspace."""
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
    """Return the bytes of a copy of the input, of the output and of the weight."""
    volumes = [size[0] * _fill_up(size[1], itemsize) * prod(size[2:]) * itemsize for size in (first, second)]
    return [*volumes, prod(_fill_up(count, itemsize) for count in weight[:2]) * prod(weight[2:]) * itemsize]


def _fill_up(channels: int, itemsize: int) -> int:
    multiple = ALIGNED // itemsize
    return -(-channels // multiple) * multiple
