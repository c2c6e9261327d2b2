# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Multiply a volume by a volume of one channel, as attention gates do: ``x * psi``, one pass forward and one backward.

torch broadcasts the one channel element by element, and backward writes a volume of products to sum over its channels.
Here one program holds the channels of a voxel and sums them directly. The product equals torch's; the gate's gradient
is rounded once, where torch first rounds each product.
"""

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

__all__ = ["differentiate", "multiply", "takes"]


@kernel()
def _multiply_kernel(
    x, gate, out, C, V, xb, xc, xv, gb, gv, ob, oc, ov, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2)
    mask = (v[:, None] < V) & (c[None, :] < C)
    factor = tl.load(gate + b.to(tl.int64) * gb + v.to(tl.int64) * gv, mask=v < V, other=0.0).to(tl.float32)
    value = tl.load(x + elements(xb, xc, xv, b, c, v), mask=mask, other=0.0).to(tl.float32)
    tl.store(out + elements(ob, oc, ov, b, c, v), (value * factor[:, None]).to(out.dtype.element_ty), mask=mask)


@kernel()
def _differentiate_kernel(
    g, x, gate, xout, gout, C, V, gb, gc, gv, xb, xc, xv, fb, fv, ob, oc, ov, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    b = tl.program_id(1)
    factor = tl.load(gate + b.to(tl.int64) * fb + v.to(tl.int64) * fv, mask=v < V, other=0.0).to(tl.float32)
    total = tl.zeros((BV,), tl.float32)
    for first in range(0, C, BC):
        c = first + tl.arange(0, BC)
        mask = (v[:, None] < V) & (c[None, :] < C)
        grad = tl.load(g + elements(gb, gc, gv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + elements(xb, xc, xv, b, c, v), mask=mask, other=0.0).to(tl.float32)
        own = (grad * factor[:, None]).to(xout.dtype.element_ty)
        tl.store(xout + elements(ob, oc, ov, b, c, v), own, mask=mask)
        total += tl.sum(grad * value, 1)
    place = gout + b.to(tl.int64) * V + v
    tl.store(place, total.to(gout.dtype.element_ty), mask=v < V)


def multiply(slab: Tensor, gate: Tensor) -> Tensor:
    """Return the product, in the slab's layout.

    Parameters
    ----------
    slab
        ``(B, C, D, H, W)``, on a GPU.
    gate
        ``(B, 1, D, H, W)``, of the same element type.
    """
    slab = make_even(slab, slab)
    gate, out = make_even(gate, gate), torch.empty_like(slab)
    channels, voxels, tile = slab.shape[1], count_voxels(slab), choose_tile(slab)
    grid = (triton.cdiv(voxels, tile[0]), triton.cdiv(channels, tile[1]), slab.shape[0])
    _multiply_kernel[grid](
        slab, gate, out, channels, voxels, *read_strides(slab), *_read_steps(gate), *read_strides(out),
        **describe_tile(tile),
    )  # fmt: skip
    return out


def differentiate(gradient: Tensor, slab: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of slab and gate.

    Parameters
    ----------
    gradient
        Gradient of the product.
    slab, gate
        See ``multiply``.
    """
    slab = make_even(slab, slab)
    gradient, gate = make_even(gradient, slab), make_even(gate, gate)
    of_slab, of_gate = torch.empty_like(slab), gate.new_empty(gate.shape)
    channels, voxels, tile = slab.shape[1], count_voxels(slab), choose_tile(slab, gradient)
    _differentiate_kernel[(triton.cdiv(voxels, tile[0]), slab.shape[0])](
        gradient, slab, gate, of_slab, of_gate, channels, voxels, *read_strides(gradient), *read_strides(slab),
        *_read_steps(gate), *read_strides(of_slab), **describe_tile(tile),
    )  # fmt: skip
    return of_slab, of_gate


def _read_steps(gate: Tensor) -> tuple[int, int]:
    sample, _, voxel = read_strides(gate)
    return sample, voxel
