# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Memory layouts of a volume ``(B, C, D, H, W)``: its dims, channels last or not, copies between the two."""

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import (
    choose_tile,
    count_voxels,
    describe_tile,
    elements,
    make_even,
    read_strides,
    takes,
)

DIM = 2
"""The dim (D) whose planes are consecutive in memory: only cuts along it use the fast paths."""


@kernel()
def _copy_kernel(
    x, out, C, V, sb, sc, sv, ob, oc, ov, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    mask = (v[:, None] < V) & (c[None, :] < C)
    value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0)
    tl.store(out + elements(ob, oc, ov, b, c, v), value, mask=mask)


def copy_into(slab: Tensor, out: Tensor) -> None:
    """Copy a slab into ``out``, which may be channels of a larger one."""
    if takes(slab) and slab.dtype == out.dtype:
        copy_by_triton(slab, out)
    else:
        out.copy_(slab)


def copy_by_triton(slab: Tensor, out: Tensor) -> None:
    """Copy a slab with the kernel, which is faster between layouts."""
    slab = make_even(slab, slab)
    tile = choose_tile(slab, out)
    grid = (triton.cdiv(count_voxels(slab), tile[0]), triton.cdiv(slab.shape[1], tile[1]), slab.shape[0])
    _copy_kernel[grid](
        slab, out, slab.shape[1], count_voxels(slab), *read_strides(slab), *read_strides(out), **describe_tile(tile)
    )  # fmt: skip


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Return the layout of a volume; a volume of one channel counts as contiguous."""
    if tensor.ndim == 5 and tensor.stride(1) == 1 and tensor.shape[1] > 1:
        return torch.channels_last_3d
    return torch.contiguous_format


def in_layout(slab: Tensor, channels_last: bool) -> Tensor:
    """Return a volume densely in the wanted layout, itself if it already is; return other tensors unchanged."""
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    if slab.ndim != 5 or slab.is_contiguous(memory_format=layout):
        return slab
    out = torch.empty(slab.shape, dtype=slab.dtype, device=slab.device, memory_format=layout)
    copy_into(slab, out)
    return out
