# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""How the Triton kernels address a slab, cut it into tiles, and are launched.

A slab is addressed as (sample, channel, voxel) with three strides, so that the same kernel serves both layouts, slices
of channels, and slabs inside a buffer with room for a halo. A tile holds ``BV`` voxels of ``BC`` channels.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

__all__ = [
    "available",
    "even",
    "launch_on",
    "processors",
    "settings",
    "spaced",
    "split_voxels",
    "strides_of",
    "takes",
    "tile_size",
    "tl",
    "triton",
    "voxel_count",
]

TILE = 4096
"""Elements per tile: 32 bytes in flight per thread of 128 in half precision."""


def available() -> bool:
    """Say whether Triton is installed."""
    return triton is not None


def takes(tensor: Tensor) -> bool:
    """Say whether Triton's kernels take this tensor: they run on a GPU and count in float32."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and triton is not None


if triton is not None:

    @triton.jit
    def elements(B_STRIDE, C_STRIDE, V_STRIDE, b, channels, voxels):
        return (
            b.to(tl.int64) * B_STRIDE
            + channels[None, :].to(tl.int64) * C_STRIDE
            + voxels[:, None].to(tl.int64) * V_STRIDE
        )


def strides_of(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of sample, channel and voxel, or None where the voxels are not evenly spaced."""
    return _strides_of(tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)  # each launch asks several times, about the same few slabs in every step
def _strides_of(size: torch.Size, stride: tuple[int, ...]) -> tuple[int, int, int] | None:
    step = stride[-1]
    for dim in range(len(size) - 2, 1, -1):
        if size[dim] > 1 and stride[dim] != stride[dim + 1] * size[dim + 1]:
            return None
    return stride[0], stride[1], step


def spaced(tensor: Tensor) -> tuple[int, int, int]:
    """Return the strides of a tensor that is evenly spaced by construction."""
    strides = strides_of(tensor)
    assert strides is not None, (tensor.shape, tensor.stride())
    return strides


def even(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor itself, or a copy laid out like ``like``, or contiguous where neither is evenly spaced."""
    if strides_of(tensor) is not None:
        return tensor
    copy = torch.empty_like(like, dtype=tensor.dtype)
    return tensor.contiguous() if strides_of(copy) is None else copy.copy_(tensor)


def tile_size(tensor: Tensor) -> tuple[int, int]:
    """Return voxels and channels per tile: whole lines of memory in either layout."""
    channels = tensor.shape[1]
    strides = strides_of(tensor)
    if strides is not None and strides[1] == 1 and channels > 1:
        width = min(128, triton.next_power_of_2(channels))
        return TILE // width, width
    return TILE, 1


def launch_on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch on the tensor's device; Triton's interpreter runs on the CPU."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


@lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def voxel_count(tensor: Tensor) -> int:
    """Return the number of voxels of each channel."""
    return tensor.shape[2:].numel()


def split_voxels(tensor: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    """Return how many programs share the voxels of a channel block, and the voxels of each."""
    voxels, (height, width) = voxel_count(tensor), tile
    blocks = triton.cdiv(tensor.shape[1], width) * tensor.shape[0]
    wanted = max(1, 4 * processors(tensor.device) // blocks)
    per_program = triton.cdiv(triton.cdiv(voxels, height), wanted) * height
    return triton.cdiv(voxels, per_program), per_program


def settings(tile: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Return the keywords of a launch."""
    return {"BV": tile[0], "BC": tile[1], "num_warps": 4, **more}
