# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Convolutions of many channels with kernels of 5 x 5 x 5, in half precision with channels last.

cuDNN chooses well for most sizes and badly for some of these, where trying all of its algorithms finds no better one:
on an H200 the weights' gradient ran at 21 TFLOP/s instead of 230 for 256 channels of any size and for 128 channels of
16 x 64 x 64, and forward at 13 for 256 channels of 16 x 16 x 16. A V-Net spent a third of its time there, and more or
less of it depending on how its volume was cut.

Forward is therefore asked for as what it is as well: the input's gradient of a convolution with the flipped kernel,
where cuDNN's choices are sound. The weights' gradient is a Triton kernel of our own, at 260 to 310 TFLOP/s: a matrix
product of ``(channels out, voxels)`` with ``(voxels, channels in)`` for each tap, over all voxels of the slab.
"""

from math import prod

import torch
from torch import Tensor

from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import DIVIDERS, count_processors, find_dividers, locate, select_device

__all__ = ["forward", "weight_gradient"]

FEWEST_TAPS, FEWEST_CHANNELS = 125, 128
"""Below, cuDNN is the faster one."""

FEWEST_VOXELS = 4096
"""Of the forward convolution: below, turning the kernel round takes as long as what it wins."""

BV, BI, BO = 64, 128, 128
"""Voxels, channels in and channels out of a tile."""


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]) -> Tensor:
    """Return the convolution, ``(B, C, D, H, W)``."""
    flipped = weight.flip(2, 3, 4).transpose(0, 1).contiguous(memory_format=torch.channels_last_3d)
    around = [k - 1 - p for k, p in zip(weight.shape[2:], padding, strict=True)]
    ones, zeros = [1, 1, 1], [0, 0, 0]
    return torch.ops.aten.convolution(slab, flipped, bias, ones, around, ones, True, zeros, 1)


@kernel(do_not_specialize=["V", "per_part", *DIVIDERS])
def _weight_kernel(
    x, gradient, out, V, per_part, D, H, W, OD, OH, OW, sb, sd, sh, sw, PD, PH, PW,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr,
    BV: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (CI + BI - 1) // BI
    tap, part = tl.program_id(0) // tiles, tl.program_id(2)
    kd, kh, kw = tap // (KH * KW), tap // KW % KH, tap % KW
    ci = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    co = tl.program_id(1) * BO + tl.arange(0, BO)
    stop = tl.minimum((part + 1) * per_part, V)
    total = tl.zeros((BO, BI), tl.float32)
    for first in range(part * per_part, stop, BV):
        v = first + tl.arange(0, BV)
        b, d, h, w = locate(v, OD, OH, OW, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d)
        d, h, w = d + kd - PD, h + kh - PH, w + kw - PW
        inside = (v < stop) & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        voxel = b.to(tl.int64) * sb + d.to(tl.int64) * sd + h.to(tl.int64) * sh + w.to(tl.int64) * sw
        values = tl.load(x + voxel[:, None] + ci[None, :], mask=inside[:, None] & (ci < CI)[None, :], other=0.0)
        place = gradient + v.to(tl.int64)[:, None] * CO + co[None, :]
        slopes = tl.load(place, mask=(v < stop)[:, None] & (co < CO)[None, :], other=0.0)
        total = tl.dot(tl.trans(slopes), values, total)
    place = out + ((part * CO + co).to(tl.int64)[:, None] * TAPS + tap) * CI + ci[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(co < CO)[:, None] & (ci < CI)[None, :])


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Return the gradient of the weight from that of the output; channels are last in all three."""
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
    out, own, *kernel = weight.shape
    sides = gradient.shape[2:]
    voxels, taps = gradient.shape[0] * prod(sides), prod(kernel)
    columns, rows = taps * triton.cdiv(own, BI), triton.cdiv(out, BO)
    # Two waves of programs, if that leaves each enough to do.
    wanted = max(1, min(2 * count_processors(slab.device) // (columns * rows), voxels // (8 * BV)))
    per_part = triton.cdiv(triton.cdiv(voxels, wanted), BV) * BV
    parts = triton.cdiv(voxels, per_part)
    dtype = weight.dtype if parts == 1 else torch.float32
    found = torch.empty((parts, out, *kernel, own), dtype=dtype, device=slab.device)
    sb, _, sd, sh, sw = slab.stride()
    with select_device(slab):
        _weight_kernel[(columns, rows, parts)](
            slab, gradient, found, voxels, per_part, *slab.shape[2:], *sides, sb, sd, sh, sw,
            *padding, *find_dividers(sides),
            CI=own, CO=out, KH=kernel[1], KW=kernel[2], TAPS=taps, BV=BV, BI=BI, BO=BO, num_warps=8, num_stages=3,
        )  # fmt: skip
    summed = found[0] if parts == 1 else found.sum(0).to(weight.dtype)
    return summed.permute(0, 4, 1, 2, 3)
