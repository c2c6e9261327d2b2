# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Address a slab in Triton kernels, cut it into tiles, and run the kernels.

A slab is addressed as (sample, channel, voxel) with three strides, so that the same kernel serves both layouts, slices
of channels, and slabs inside a buffer with room for a halo. A tile holds ``BV`` voxels of ``BC`` channels.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from volseg.device import gpus
from volseg.device.triton_kernels import INSTALLED, tl, triton

TILE = 4096
"""Elements per tile: 32 bytes in flight per thread of 128 in half precision."""

STAGES = 3
"""Stages of a loop that sums tiles: while one tile is added, the next one travels to shared memory, and the third
is requested. Without this setting, the assembler may put a load after the arithmetic on the tile before."""

MOST_VOXELS = 2**30
"""Limit of voxels of a channel, counted in 32 bits, by some kernels a few tiles beyond; elements may be more."""


def available() -> bool:
    """Return whether Triton kernels are available: Triton is installed, or they are only noted."""
    return INSTALLED or not gpus.has_values()


def takes(tensor: Tensor) -> bool:
    """Return whether Triton's kernels support a tensor: on a GPU, up to float32, with voxels counted in 32 bits."""
    if not (gpus.on_gpu(tensor) and tensor.dtype != torch.float64 and available()):
        return False
    return tensor.numel() <= MOST_VOXELS or count_voxels(tensor) <= MOST_VOXELS


@triton.jit
def elements(B_STRIDE, C_STRIDE, V_STRIDE, b, channels, voxels):
    """Return the offsets of the elements of voxels and channels of sample ``b``, ``[voxels, channels]``."""
    return (
        b.to(tl.int64) * B_STRIDE + channels[None, :].to(tl.int64) * C_STRIDE + voxels[:, None].to(tl.int64) * V_STRIDE
    )


def compute_strides(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of sample, channel and voxel, or None if the voxels are not evenly spaced."""
    return _compute_strides(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)  # each run of a kernel calls it several times, for the same few slabs in every step
def _compute_strides(size: torch.Size, stride: tuple[int, ...]) -> tuple[int, int, int] | None:
    step, expected = stride[-1], None
    for dim in range(len(size) - 1, 1, -1):
        if size[dim] == 1:  # its stride, which may be any, is never used
            continue
        if expected is None:
            step = expected = stride[dim]
        elif stride[dim] != expected:
            return None
        expected *= size[dim]
    # With one channel the step to the next is never used, and 0 hides nothing from the compiler: with 1, as in
    # channels-last layout, no line of memory would begin evenly, and each element would be loaded by itself.
    return stride[0], stride[1] if size[1] > 1 else 0, step


def read_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a tensor that is evenly spaced by construction."""
    strides = compute_strides(tensor)
    assert strides is not None, (tensor.shape, tensor.stride())
    return strides


def make_even(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor itself, or a copy in the layout of ``like``, or contiguous if neither is evenly spaced."""
    if compute_strides(tensor) is not None:
        return tensor
    copy = torch.empty_like(like, dtype=tensor.dtype)
    return tensor.contiguous() if compute_strides(copy) is None else copy.copy_(tensor)


def choose_tile(*tensors: Tensor) -> tuple[int, int]:
    """Return voxels and channels per tile, which holds whole lines of memory of all tensors of a kernel.

    For different layouts it is the tile of channels-last tensors: its voxels of one channel are whole lines too.
    """
    return max(map(_choose_tile, tensors), key=lambda size: size[1])


def _choose_tile(tensor: Tensor) -> tuple[int, int]:
    channels = tensor.shape[1]
    strides = compute_strides(tensor)
    if strides is not None and strides[1] == 1 and channels > 1:
        width = min(128, triton.next_power_of_2(channels))
        return TILE // width, width
    return TILE, 1


def halve(tile: tuple[int, int]) -> tuple[int, int]:
    """Return a tile of half as many voxels, for kernels that keep several numbers of each place in registers."""
    return max(1, tile[0] // 2), tile[1]


def is_narrow(tensor: Tensor, tile: tuple[int, int]) -> bool:
    """Return whether lines of channels begin at uneven places, so that each element is loaded separately."""
    return tile[1] > 1 and tensor.shape[1] % 8 != 0


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; Triton's interpreter has one."""
    return gpus.count_processors(device)


def count_voxels(tensor: Tensor) -> int:
    """Return the number of voxels of each channel."""
    return tensor.shape[2:].numel()


def split_voxels(tensor: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    """Return the number of programs that share the voxels of a channel block, and the voxels of each."""
    voxels, (height, width) = count_voxels(tensor), tile
    blocks = triton.cdiv(tensor.shape[1], width) * tensor.shape[0]
    wanted = max(1, 4 * count_processors(tensor.device) // blocks)
    per_program = triton.cdiv(triton.cdiv(voxels, height), wanted) * height
    return triton.cdiv(voxels, per_program), per_program


def describe_tile(tile: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Return the keywords of a kernel for tiles of these voxels and channels."""
    return {"BV": tile[0], "BC": tile[1], "num_warps": 4, **more}


@triton.jit
def _divide(v, multiplier, shift):
    """Return ``v // n`` for ``v`` below 2**31; see ``compute_divider``."""
    v = v.to(tl.uint32)
    return ((tl.umulhi(v, multiplier.to(tl.uint32)) + v) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def locate(v, D, H, W, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d):
    """Return sample, d, h and w of voxels that are counted over all samples; see ``compute_dividers``."""
    line = _divide(v, mul_w, shr_w)
    plane = _divide(line, mul_h, shr_h)
    sample = _divide(plane, mul_d, shr_d)
    return sample, plane - sample * D, line - plane * H, v - line * W


DIVIDERS = ["mul_w", "shr_w", "mul_h", "shr_h", "mul_d", "shr_d"]
"""Arguments whose values do not cause another compilation of a kernel."""


def compute_dividers(sides: Sequence[int]) -> list[int]:
    """Return the multipliers and shifts by which ``locate`` divides by the sides D, H, W of a volume."""
    return [number for side in reversed(sides) for number in compute_divider(side)]


@lru_cache(maxsize=1024)
def compute_divider(n: int) -> tuple[int, int]:
    """Return a multiplier, as the bits of a signed number, and a shift that divide by ``n`` without a division.

    Granlund and Montgomery, 1994, doi:10.1145/178243.178249, figure 4.1.
    """
    shift = (n - 1).bit_length()
    multiplier = 2**32 * (2**shift - n) // n + 1
    return multiplier - 2**32 if multiplier >= 2**31 else multiplier, shift
