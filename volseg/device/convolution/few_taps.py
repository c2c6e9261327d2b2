# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Convolution of few channels in half precision with channels last, a network's first: two Triton kernels.

cuDNN has no tensor core kernel for one input channel, computes in contiguous layout and converts afterwards. Here the
taps of a voxel (3 x 3 x 3 of one channel: 27, padded to 32) take the place of the channels: a matrix product of
``(voxels, taps)``, gathered from a volume small enough for the caches, with ``(taps, channels)``. cuDNN computes the
input's gradient, which a first convolution does not need.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import DIVIDERS, compute_dividers, count_processors, locate

MOST_TAPS = 128
"""Limit of taps of one output voxel."""

MOST_INPUTS, MOST_INPUTS_OF_UNEVEN = 8, 32
"""Limit of input channels, and for output channels that are not multiples of 8, of which cuDNN is slow. For others 16
channels with 2 x 2 x 2 taps take 2.6 times as long as by cuDNN, and the weight's gradient of 32 with one tap 1.4 times
(``workflows/benchmarks/results/networks_h200_convolutions.json``)."""

FEWEST_CHANNELS, MOST_CHANNELS = 16, 64
"""Supported output channels."""

NOT_SPECIALIZED = ["D", "H", "OD", "OH", *DIVIDERS]
"""Arguments whose divisibility by 16 changes no instruction; another patch size would need another compilation."""


@triton.jit
def _gather(
    x, first, stop, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW, SD, SH, SW, TAPS,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Return the input under each tap of the output voxels from ``first`` on, ``[BV, BT]``."""
    v = first + tl.arange(0, BV)
    b, d, h, w = locate(v, OD, OH, OW, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d)
    t = tl.arange(0, BT)
    zd = d[:, None] * SD + ((t // (KW * KH)) % KD - PD)[None, :]
    zh = h[:, None] * SH + ((t // KW) % KH - PH)[None, :]
    zw = w[:, None] * SW + (t % KW - PW)[None, :]
    inside = (zd >= 0) & (zd < D) & (zh >= 0) & (zh < H) & (zw >= 0) & (zw < W)
    inside = inside & (v[:, None] < stop) & (t[None, :] < TAPS)
    place = b.to(tl.int64)[:, None] * sb + (t // (KW * KH * KD)).to(tl.int64)[None, :] * sc
    place += zd.to(tl.int64) * sd + zh.to(tl.int64) * sh + zw.to(tl.int64) * sw
    return tl.load(x + place, mask=inside, other=0.0)


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _forward_kernel(
    x, weight, bias, out, V, N, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW, SD, SH, SW, TAPS,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BV
    taps = _gather(
        x, first, V, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW, SD, SH, SW, TAPS,
        mul_w, shr_w, mul_h, shr_h, mul_d, shr_d, KD, KH, KW, BV, BT,
    )  # fmt: skip
    t, n = tl.arange(0, BT), tl.arange(0, BN)
    kernel = tl.load(weight + n[None, :] * TAPS + t[:, None], mask=(n[None, :] < N) & (t[:, None] < TAPS), other=0.0)
    v = first + tl.arange(0, BV)
    place = out + v.to(tl.int64)[:, None] * N + n[None, :]
    total = tl.dot(taps, kernel)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(v[:, None] < V) & (n[None, :] < N))


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _weight_kernel(
    x, gradient, out, V, N, per_program, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW, SD, SH, SW, TAPS,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    stop = tl.minimum((part + 1) * per_program, V)
    t, n = tl.arange(0, BT), tl.arange(0, BN)
    total = tl.zeros((BT, BN), tl.float32)
    for first in range(part * per_program, stop, BV):
        taps = _gather(
            x, first, stop, D, H, W, OD, OH, OW, sb, sc, sd, sh, sw, PD, PH, PW, SD, SH, SW, TAPS,
            mul_w, shr_w, mul_h, shr_h, mul_d, shr_d, KD, KH, KW, BV, BT,
        )  # fmt: skip
        v = first + tl.arange(0, BV)
        place = gradient + v.to(tl.int64)[:, None] * N + n[None, :]
        slopes = tl.load(place, mask=(v[:, None] < stop) & (n[None, :] < N), other=0.0)
        total += tl.dot(tl.trans(taps), slopes)
    tl.store(out + (part * BN + n[None, :]) * BT + t[:, None], total)


def _describe_geometry(slab: Tensor, weight: Tensor, settings: Settings) -> tuple[list[int], dict[str, Any]]:
    """Return the output's sides, and the kernels' arguments that describe the volume."""
    sides, kernel = settings.compute_sides(slab, weight), weight.shape[2:]
    told = {
        **dict(zip("DHW", slab.shape[2:], strict=True)),
        **dict(zip(("OD", "OH", "OW"), sides, strict=True)),
        **dict(zip(("sb", "sc", "sd", "sh", "sw"), slab.stride(), strict=True)),
        **dict(zip(("PD", "PH", "PW"), settings.padding, strict=True)),
        **dict(zip(("SD", "SH", "SW"), settings.stride, strict=True)),
        **dict(zip(("KD", "KH", "KW"), kernel, strict=True)),
        "TAPS": slab.shape[1] * prod(kernel),
        **dict(zip(DIVIDERS, compute_dividers(sides), strict=True)),
    }
    return sides, told


def _choose_tile(taps: int, channels: int) -> dict[str, int]:
    width = max(16, triton.next_power_of_2(taps))
    return {"BT": width, "BN": max(16, triton.next_power_of_2(channels)), "BV": max(32, 4096 // width)}


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution, ``(B, N, D, H, W)`` with channels last."""
    sides, told = _describe_geometry(slab, weight, settings)
    channels = weight.shape[0]
    out = new_volume(slab, channels, sides)
    voxels = slab.shape[0] * prod(sides)
    tile = _choose_tile(told["TAPS"], channels)
    _forward_kernel[(triton.cdiv(voxels, tile["BV"]),)](
        slab, weight.reshape(channels, -1).contiguous(), bias, out, voxels, channels,
        **told, **tile, BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the weight from that of the output."""
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)  # planes of several samples are not dense
    sides, told = _describe_geometry(slab, weight, settings)
    channels = weight.shape[0]
    voxels = slab.shape[0] * prod(sides)
    tile = _choose_tile(told["TAPS"], channels)
    per_program = triton.cdiv(triton.cdiv(voxels, tile["BV"]), 4 * count_processors(slab.device)) * tile["BV"]
    parts = triton.cdiv(voxels, per_program)
    out = torch.empty((parts, tile["BN"], tile["BT"]), dtype=torch.float32, device=slab.device)
    _weight_kernel[(parts,)](slab, gradient, out, voxels, channels, per_program, **told, **tile, num_warps=4)
    return out.sum(0)[:channels, : told["TAPS"]].reshape(weight.shape).to(weight.dtype)
