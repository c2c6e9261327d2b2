# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""A network's heads, convolutions of one voxel to classes, in half precision: two Triton kernels.

The kernels only read and write memory, once in forward and once in backward; cuDNN and torch take several kernels
outside the matrix units and copies between layouts. Features are read in channels-last layout, logits are written
contiguously, as losses and predictions read them. Backward supports few classes; for many, only forward.
"""

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_processors, count_voxels, make_even, read_strides

MOST_CLASSES, MOST_FEATURES = 16, 256

MOST_CLASSES_OF_FORWARD = 1024
"""Limit of classes in forward: a voxel's features are read again for every 128 of them."""


@triton.jit
def _locate(base, b, rows, columns, SB, SC, SV):
    """Return the addresses of the voxels ``rows`` and channels ``columns`` of sample b, ``[rows, columns]``."""
    at = b.to(tl.int64) * SB + rows[:, None].to(tl.int64) * SV
    return base + at + columns[None, :].to(tl.int64) * SC


@kernel()
def _forward_kernel(
    x, weight, bias, out, V, N, C, xb, xc, xv,
    BIAS: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    v, c = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BC)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    features = tl.load(_locate(x, b, v, c, xb, xc, xv), mask=(v[:, None] < V) & (c[None, :] < C), other=0.0)
    kernel = tl.load(weight + n[None, :] * C + c[:, None], mask=(n[None, :] < N) & (c[:, None] < C), other=0.0)
    logits = tl.dot(features, kernel)
    if BIAS:
        logits += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + b.to(tl.int64) * N * V + n[None, :].to(tl.int64) * V + v[:, None]
    tl.store(place, logits.to(out.dtype.element_ty), mask=(v[:, None] < V) & (n[None, :] < N))


@kernel()
def _backward_kernel(
    x, gradient, weight, out, sums, V, N, C, per_program, xb, xc, xv, gb, gc, gv,
    INPUT: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part, b = tl.program_id(0), tl.program_id(1)
    c, n = tl.arange(0, BC), tl.arange(0, BN)
    stop = tl.minimum((part + 1) * per_program, V)
    kernel = tl.load(weight + n[:, None] * C + c[None, :], mask=(n[:, None] < N) & (c[None, :] < C), other=0.0)
    of_weight = tl.zeros((BN, BC), tl.float32)
    of_bias = tl.zeros((BN,), tl.float32)
    for first in range(part * per_program, stop, BV):
        v = first + tl.arange(0, BV)
        inside = (v[:, None] < stop) & (c[None, :] < C)
        slopes = tl.load(_locate(gradient, b, v, n, gb, gc, gv), mask=(v[:, None] < stop) & (n[None, :] < N), other=0.0)
        features = tl.load(_locate(x, b, v, c, xb, xc, xv), mask=inside, other=0.0)
        of_weight += tl.dot(tl.trans(slopes), features)
        of_bias += tl.sum(slopes.to(tl.float32), 0)
        if INPUT:
            place = out + (b.to(tl.int64) * V + v[:, None]) * C + c[None, :]
            tl.store(place, tl.dot(slopes, kernel).to(out.dtype.element_ty), mask=inside)
    own = sums + (b * tl.num_programs(0) + part) * BN * (BC + 1)
    tl.store(own + n[:, None] * (BC + 1) + c[None, :], of_weight)
    tl.store(own + n * (BC + 1) + BC, of_bias)


def _choose_tile(features: int, classes: int = MOST_CLASSES) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(features))
    if classes <= MOST_CLASSES:
        return {"BV": max(32, min(256, 8192 // width)), "BC": width, "BN": MOST_CLASSES, "num_warps": 4}
    together = min(128, triton.next_power_of_2(classes))  # the sums of 128 x 128 logits fit into registers
    return {"BV": max(32, min(128, 8192 // width)), "BC": width, "BN": together, "num_warps": 8}


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, _settings: Settings | None = None) -> Tensor:
    """Return the logits, ``(B, N, D, H, W)``, contiguous."""
    slab = make_even(slab, slab)
    batch, features = slab.shape[:2]
    classes, voxels, tile = weight.shape[0], count_voxels(slab), _choose_tile(features, weight.shape[0])
    out = slab.new_empty((batch, classes, *slab.shape[2:]))
    weight = weight.reshape(classes, features).contiguous()
    _forward_kernel[(triton.cdiv(voxels, tile["BV"]), batch, triton.cdiv(classes, tile["BN"]))](
        slab, weight, weight if bias is None else bias, out, voxels, classes, features, *read_strides(slab),
        BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out


def backward(gradient: Tensor, slab: Tensor, weight: Tensor, needs_input: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input (with channels last, None unless needed), the weight and a bias."""
    slab, gradient = make_even(slab, slab), make_even(gradient, gradient)
    batch, features = slab.shape[:2]
    classes, voxels, tile = weight.shape[0], count_voxels(slab), _choose_tile(features)
    wanted = max(1, 4 * count_processors(slab.device) // batch)
    per_program = triton.cdiv(triton.cdiv(voxels, tile["BV"]), wanted) * tile["BV"]
    parts = triton.cdiv(voxels, per_program)
    out = torch.empty_like(slab, memory_format=torch.channels_last_3d) if needs_input else None
    sums = slab.new_empty((batch * parts, tile["BN"], tile["BC"] + 1), dtype=torch.float32)
    _backward_kernel[(parts, batch)](
        slab, gradient, weight.reshape(classes, features).contiguous(), slab if out is None else out, sums,
        voxels, classes, features, per_program, *read_strides(slab), *read_strides(gradient),
        INPUT=needs_input, **tile,
    )  # fmt: skip
    total = sums.sum(0)[:classes]
    of_weight = total[:, :features].reshape(weight.shape).to(weight.dtype)
    return out, of_weight, total[:, -1].to(weight.dtype)
