# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Convolution of few channels to many in half precision, channels-last layout, with kernels of many taps.

In channels-last layout the taps along W of a voxel are one run in memory. Runs of one or more lines of taps fill the
columns of a matrix, ``(voxels, taps)``, which is multiplied with ``(taps, channels)`` for each of the other taps
along H and D. A column's offset from a voxel, and whether it is inside along W and H, is computed once for all of
these; ``few_taps`` recomputes each tap's address.

A V-Net begins with such a convolution (5 x 5 x 5 voxels of one channel), and the input's gradient of its last one is
another: see ``few_out``.
"""

from math import prod

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import DIVIDERS, compute_dividers, count_processors, locate

FEWEST_CHANNELS, MOST_CHANNELS = 16, 64
"""Supported output channels."""

MOST_IN = 6
"""Limit of input channels, for which lines of five taps fit in the columns of a tile."""

MOST_TAPS_ONE_BY_ONE = 32
"""Limit of taps over all input channels: up to this number ``few_taps`` is faster."""

VOXELS, WARPS = 128, 4
"""Tile forward."""

WEIGHT_VOXELS, WEIGHT_WARPS = 128, 4
"""Tile of the weight's gradient: with most columns, twice as many warps; with 64 channels, half the voxels."""

MOST_COLUMNS, MOST_WEIGHT_COLUMNS = 32, 128
"""Columns of a tile forward, and of the weight's gradient. A line of taps of all channels fits into the first."""

NOT_SPECIALIZED = ["V", "D", "H", "OD", "OH", *DIVIDERS]
"""Arguments whose divisibility by 16 changes no instruction; another patch size would need another compilation."""


def can_read(slab: Tensor) -> bool:
    """Return whether neighbours along W are contiguous with their channels, and 32-bit offsets reach all elements."""
    is_dense = slab.stride(4) == slab.shape[1] and (slab.shape[1] == 1 or slab.stride(1) == 1)
    return is_dense and sum((side - 1) * way for side, way in zip(slab.shape, slab.stride(), strict=True)) < 2**31


def _get_strides(slab: Tensor) -> tuple[int, int, int]:
    """Return the strides of samples, planes and lines: 0 for a single one, whose stride may exceed 32 bits.

    Sums of 64-bit addresses with 32-bit offsets that overflow would be wrong.
    """
    sb, _, sd, sh, _ = (way if side > 1 else 0 for side, way in zip(slab.shape, slab.stride(), strict=True))
    return sb, sd, sh


@triton.jit
def _find_runs(
    b, d, h, w, there, W, sb, sd, sh, N: tl.constexpr, KW: tl.constexpr, LINES: tl.constexpr, BN: tl.constexpr
):
    """Return the addresses of the first lines of taps, ``[BV, BN]``; whether they are inside along W; and their h."""
    j = tl.arange(0, BN)
    zh, zw = h[:, None] + (j // (KW * N))[None, :], w[:, None] + (j // N % KW)[None, :]
    inside = there[:, None] & (zw >= 0) & (zw < W) & (j < LINES * KW * N)[None, :]
    place = (b * sb + d * sd + h * sh + w * N)[:, None] + (j // (KW * N) * sh + j % (KW * N))[None, :]
    return place, inside, zh


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _forward_kernel(
    x, weight, bias, out, V, D, H, W, OD, OH, OW, sb, sd, sh, PD, PH, PW,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    C: tl.constexpr, N: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr,
    LINES: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (KH + LINES - 1) // LINES
    v, j, c = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BN), tl.arange(0, BC)
    b, d, h, w = locate(v, OD, OH, OW, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d)
    d -= PD
    place, in_line, zh = _find_runs(b, d, h - PH, w - PW, v < V, W, sb, sd, sh, N, KW, LINES, BN)
    total = tl.zeros((BV, BC), tl.float32)
    for tap in range(KD * groups):
        kd, kh = tap // groups, tap % groups * LINES
        is_tap = j < (KH - kh) * (KW * N)
        inside = in_line & ((d + kd >= 0) & (d + kd < D))[:, None] & (zh + kh >= 0) & (zh + kh < H) & is_tap[None, :]
        runs = tl.load(x + (place + (kd * sd + kh * sh)), mask=inside, other=0.0)
        rows = weight + ((kd * KH + kh) * (KW * N) + j[:, None]) * C + c[None, :]
        fits = (is_tap & (j < LINES * KW * N))[:, None] & (c < C)[None, :]
        total = tl.dot(runs, tl.load(rows, mask=fits, other=0.0), total)
    if BIAS:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    place = out + v.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(v < V)[:, None] & (c < C)[None, :])


@kernel(do_not_specialize=[*NOT_SPECIALIZED, "per_part"])
def _weight_kernel(
    x, gradient, out, V, per_part, D, H, W, OD, OH, OW, sb, sd, sh, gb, gd, gh, gw, PD, PH, PW,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    C: tl.constexpr, N: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    LINES: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = (KH + LINES - 1) // LINES
    part, tap = tl.program_id(0), tl.program_id(1)
    kd, kh = tap // groups, tap % groups * LINES
    stop = tl.minimum((part + 1) * per_part, V)
    j, c = tl.arange(0, BN), tl.arange(0, BC)
    is_tap = (j < (KH - kh) * (KW * N)) & (j < LINES * KW * N)
    total = tl.zeros((BN, BC), tl.float32)
    for first in range(part * per_part, stop, BV):
        v = first + tl.arange(0, BV)
        b, d, h, w = locate(v, OD, OH, OW, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d)
        place, in_line, zh = _find_runs(b, d - PD, h - PH, w - PW, v < stop, W, sb, sd, sh, N, KW, LINES, BN)
        inside = (
            in_line & ((d + kd >= PD) & (d + kd < D + PD))[:, None] & (zh + kh >= 0) & (zh + kh < H) & is_tap[None, :]
        )
        runs = tl.load(x + (place + (kd * sd + kh * sh)), mask=inside, other=0.0)
        rows = b.to(tl.int64) * gb + d.to(tl.int64) * gd + h.to(tl.int64) * gh + w.to(tl.int64) * gw
        fits = (v < stop)[:, None] & (c < C)[None, :]
        slopes = tl.load(gradient + rows[:, None] + c[None, :], mask=fits, other=0.0)
        total = tl.dot(tl.trans(runs), slopes, total)
    place = out + ((part * (KD * KH * KW * N) + (kd * KH + kh) * (KW * N) + j)[:, None] * C + c[None, :])
    tl.store(place, total, mask=is_tap[:, None] & (c < C)[None, :])


def _choose_lines(channels: int, kernel: torch.Size) -> tuple[int, int]:
    """Return the number of lines of taps in the columns of a tile forward, and the number of these columns.

    The choice reads the fewest columns, and among equal numbers reads them the fewest times.
    """
    depth, height, width = kernel
    choices = []
    for lines in range(1, height + 1):
        columns = max(16, triton.next_power_of_2(lines * width * channels))
        if lines == 1 or columns <= MOST_COLUMNS:
            groups = -(-height // lines)
            choices.append((depth * groups * columns, groups, lines, columns))
    *_, lines, columns = min(choices)
    return lines, columns


def _choose_most_lines(channels: int, kernel: torch.Size) -> tuple[int, int]:
    """Return the largest number of lines in the columns of a tile, and their columns, for the weight's gradient.

    Each of its tiles reads the output's gradient again, and computes its addresses.
    """
    _, height, width = kernel
    lines = max(1, min(height, MOST_WEIGHT_COLUMNS // (width * channels)))
    return lines, max(16, triton.next_power_of_2(lines * width * channels))


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution, ``(B, C, D, H, W)`` with channels last, of a slab whose lines are dense."""
    sides = settings.compute_sides(slab, weight)
    out, voxels = new_volume(slab, weight.shape[0], sides), slab.shape[0] * prod(sides)
    lines, columns = _choose_lines(slab.shape[1], weight.shape[2:])
    _forward_kernel[(triton.cdiv(voxels, VOXELS),)](
        slab, weight.permute(2, 3, 4, 1, 0).flatten(0, 1).contiguous(), bias, out, voxels,
        *slab.shape[2:], *sides, *_get_strides(slab), *settings.padding, *compute_dividers(sides),
        **dict(zip(("C", "N", "KD", "KH", "KW"), weight.shape, strict=True)), BIAS=bias is not None,
        LINES=lines, BV=VOXELS, BN=columns, BC=max(16, triton.next_power_of_2(weight.shape[0])), num_warps=WARPS,
    )  # fmt: skip
    return out


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the weight from that of the output, whose channels are last."""
    sides, (channels, own, *kernel) = gradient.shape[2:], weight.shape
    voxels = gradient.shape[0] * prod(sides)
    lines, columns = _choose_most_lines(own, weight.shape[2:])
    taps = kernel[0] * triton.cdiv(kernel[1], lines)
    height, warps = WEIGHT_VOXELS, WEIGHT_WARPS
    if channels > 32:  # otherwise registers and shared memory would not suffice
        height //= 2
    elif columns == MOST_WEIGHT_COLUMNS:
        height, warps = 2 * height, 2 * warps
    wanted = max(1, 4 * count_processors(slab.device) // taps)
    per_part = triton.cdiv(triton.cdiv(voxels, wanted), height) * height
    parts = triton.cdiv(voxels, per_part)
    out = torch.empty((parts, 1, *kernel, own * channels), dtype=torch.float32, device=slab.device)
    gb, _, gd, gh, gw = gradient.stride()
    _weight_kernel[(parts, taps)](
        slab, gradient, out, voxels, per_part, *slab.shape[2:], *sides, *_get_strides(slab), gb, gd, gh, gw,
        *settings.padding, *compute_dividers(sides),
        **dict(zip(("C", "N", "KD", "KH", "KW"), weight.shape, strict=True)),
        LINES=lines, BV=height, BN=columns, BC=max(16, triton.next_power_of_2(channels)), num_warps=warps,
        num_stages=1,
    )  # fmt: skip
    return out.sum(0).view(*kernel, own, channels).permute(4, 3, 0, 1, 2).to(weight.dtype)
