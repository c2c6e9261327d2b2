"""How much scratch memory cuDNN takes for a convolution.

Torch hands cuDNN a block of its own allocator for the time of each call. Its size was read off the allocator's account
of steps on an H200 (cuDNN 9, ``workflows/benchmarks/plan_accuracy.py``). Each term has a cause:

- cuDNN's matrix kernels read volumes with channels last. Where they lie otherwise, input, weight and output are copied
  there and back, with channels filled up to a multiple of 16 bytes;
- the gradient of a weight is a sum over all voxels. A weight with few channels makes too few tiles to keep the GPU
  busy, so the sum is divided, and each part is kept in float32.

With ``torch.backends.cudnn.benchmark`` the same blocks were taken. Not modelled: that sums are divided otherwise where
volumes are small, and what other kinds of GPU take, whose numbers of processors differ.
"""

from collections.abc import Sequence
from math import log, prod

import torch

__all__ = ["find_workspace", "find_workspace_of_weights"]

ALIGNED = 16
"""Bytes to a multiple of which the channels of a voxel are filled up."""

SMALLEST = 512
"""cuDNN asks for a few bytes where it needs none."""

SUMS: dict[int, dict[tuple[int, int, int], tuple[tuple[int, int], ...]]] = {
    2: {
        (1, 8, 8): ((2**22, 4 * 2**20),),
        (1, 8, 32): ((2**22, 1_049_267),),
        (8, 16, 32): ((49_152, 1_966_735),),
        (8, 16, 64): ((49_152, 1_966_735),),
        (8, 32, 64): ((65_536, 1_966_735),),
        (8, 32, 128): ((65_536, 1_835_631),),
        (8, 64, 128): ((65_536, 1_835_631),),
        (27, 8, 32): ((806_400, 622_927), (4_194_304, 2_065_071)),
        (27, 32, 32): ((806_400, 2_179_807), (4_194_304, 6_080_151)),
        (27, 32, 64): ((524_288, 1_475_095), (4_194_304, 1_769_971)),
        (27, 64, 64): ((100_800, 1_769_971),),
        (27, 64, 128): ((65_536, 3_539_443), (100_800, 3_670_527), (524_288, 3_539_443)),
        (27, 128, 128): ((65_536, 3_670_415),),
        (125, 8, 16): ((393_216, 3_408_911), (4_194_304, 786_831)),
        (125, 8, 32): ((393_216, 66_601_135), (4_194_304, 27_794_351)),
        (125, 32, 32): ((49_152, 7_866_543), (393_216, 9_964_207), (524_288, 524_719), (4_194_304, 27_794_351)),
        (125, 64, 64): ((49_152, 22_534_175),),
        (125, 128, 128): ((65_536, 8_196_175),),
    },
    4: {
        (27, 32, 32): ((4_194_304, 10_095_239),),
        # The second by what a DynUNet reserved: its block went into that of the input's gradient.
        (27, 32, 64): ((524_288, 10_095_239), (4_194_304, 1_769_971)),
        (27, 64, 64): ((524_288, 1_769_971),),
        (27, 64, 128): ((65_536, 3_670_527),),
        (27, 128, 128): ((65_536, 7_078_387),),
        (27, 128, 256): ((8_192, 7_078_279),),
        # In as many parts as 27 voxels of the same channels, which is what a V-Net's peak says.
        (125, 4, 32): ((4_194_304, 46_737_217),),
        (125, 32, 32): ((4_194_304, 46_737_217),),
    },
}
"""Bytes of the parts of sums that were taken: by bytes of an element; by voxels of the kernel, and channels, the fewer
first; by voxels that are summed over."""

DIVIDED = 32_768
"""Voxels from which on a sum is divided: of half precision, 12 600 were not and 49 152 were."""

WRITTEN_IN_PLACE = 64
"""Channels of a float32 output that cuDNN wrote where it belongs, and did not copy; of 32, 128 and 256 it did."""

TILE, TILES = 4096, 120
"""Elements of a weight that are computed together, and how many such tiles fill an H200 with its 132 processors."""


def find_workspace(
    first: torch.Size,
    second: torch.Size,
    weight: torch.Size,
    dtype: torch.dtype,
    *,
    channels_last: bool,
    backward: bool = False,
) -> int:
    """Return the bytes for a convolution, or for the gradient of its input.

    Parameters
    ----------
    first, second : torch.Size
        Of input and output, (B, C, ...).
    weight : torch.Size
        Of its weight, (C, C, ...).
    dtype : torch.dtype
        In which it computes.
    channels_last : bool
        Whether volumes lie so in memory.
    backward : bool
        Whether it is the gradient.
    """
    if channels_last or not _is_copied(first, weight):
        return SMALLEST
    volumes = [first] if not backward and dtype.itemsize == 4 and second[1] == WRITTEN_IN_PLACE else [first, second]
    return sum(_count_volume(size, dtype) for size in volumes) + _count_weight(weight, dtype) + SMALLEST


def find_workspace_of_weights(
    first: torch.Size, second: torch.Size, weight: torch.Size, dtype: torch.dtype, *, channels_last: bool
) -> int:
    """Return the bytes for the gradient of a convolution's weight; see `find_workspace`."""
    sums = _count_sums(first, second, weight, dtype)
    if channels_last:
        return sums + SMALLEST
    return sum(_count_volume(size, dtype) for size in (first, second)) + _count_weight(weight, dtype) + sums + SMALLEST


def _count_sums(first: torch.Size, second: torch.Size, weight: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes of a weight's parts of sums: as measured for its channels on the nearest volume, or guessed."""
    voxels = min(size[0] * prod(size[2:]) for size in (first, second))
    few, many = sorted(_fill_up(count, dtype) for count in weight[:2])
    measured = SUMS.get(dtype.itemsize, {}).get((prod(weight[2:]), few, many))
    if voxels < DIVIDED and (dtype.itemsize == 2 or measured is None):
        return 0
    if measured is not None:
        return min(measured, key=lambda one: abs(log(one[0] / voxels)))[1]
    size = prod(weight[2:]) * few * many
    parts = TILES // -(-size // TILE)
    return parts * size * 4 if parts > 1 else 0


def _is_copied(first: torch.Size, weight: torch.Size) -> bool:
    """Say whether a kernel that reads channels last is taken: not for one channel, nor for kernels of one voxel."""
    return first[1] > 1 and prod(weight[2:]) > 1


def _fill_up(channels: int, dtype: torch.dtype) -> int:
    multiple = ALIGNED // dtype.itemsize
    return -(-channels // multiple) * multiple


def _count_volume(size: Sequence[int], dtype: torch.dtype) -> int:
    return size[0] * _fill_up(size[1], dtype) * prod(size[2:]) * dtype.itemsize


def _count_weight(size: Sequence[int], dtype: torch.dtype) -> int:
    return prod(_fill_up(count, dtype) for count in size[:2]) * prod(size[2:]) * dtype.itemsize
