# ruff: noqa: N803, RUF005  (upper case: what Triton is compiled for; it unpacks no tuples)
# mypy: disable-error-code="no-untyped-def, assignment"
"""Depthwise convolutions, each channel separately, in half precision with channels last: two Triton kernels.

torch has one kernel for them, which reads contiguous volumes voxel by voxel, and assigns each weight's gradient to one
block. In channels-last layout, a tile of voxels times channels is read in whole lines, and each plane is read once for
all output planes of the tile, whose sums stay in registers.

Forward and the input's gradient are one kernel. The gradient of an input voxel gathers the taps that reach it: with a
stride, each remainder of its position has other taps, so each remainder has its own run, with the weights in opposite
order. A transposed convolution is the input's gradient with input and output exchanged.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.layout import in_layout
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_processors

MOST_TAPS = 7
"""Largest number of taps along a side of the kernel."""

MOST_STRIDE, MOST_DILATION = 4, 4
"""The planes that a tile reads are counted when the kernel is compiled."""

MOST_UNROLLED = 9
"""Limit of taps that are unrolled together. The weight's gradient keeps a sum for each, 8 registers each."""

PLANES = 4
"""Output planes in a tile."""

ELEMENTS, MOST_CHANNELS = 1024, 32
"""Elements and channels of each plane: 8 neighbouring channels per thread of 128."""


@triton.jit
def _locate(tile, ND, NH, NW, PLANES: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """Return sample, first plane, lines and columns of an output tile."""
    place = tl.arange(0, BH * BW)
    line = tile // NW
    plane = line // NH
    return plane // ND, plane % ND * PLANES, line % NH * BH + place // BW, tile % NW * BW + place % BW


@kernel()
def _depthwise_kernel(
    x, weight, bias, out, C, D, H, W, OD, OH, OW, xb, xd, xh, xw, ob, od, oh, ow, PD, PH, PW, NC, ND, NH, NW,
    at, step_d, step_h, step_w,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    PLANES: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) % NC * BC + tl.arange(0, BC)
    b, first, line, column = _locate(tl.program_id(0) // NC, ND, NH, NW, PLANES, BH, BW)
    begin = tl.zeros((BH * BW, BC), tl.float32)
    if BIAS:
        begin += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    sums = ()
    for _ in tl.static_range(PLANES):
        sums = sums + (begin,)
    source = x + b.to(tl.int64) * xb
    for kh in range(KH):
        h = line * SH + kh * DH - PH
        # Not all taps are unrolled: 7 x 7 x 7 taps would take long to compile, and need too many registers.
        for turn in range(0, KW, COLUMNS):
            for index in tl.static_range(COLUMNS):
                kw = turn + index
                w = column * SW + kw * DW - PW
                inside, own_channels = (h >= 0) & (h < H) & (w >= 0) & (w < W), c < C
                if KW % COLUMNS != 0:
                    inside, own_channels = inside & (kw < KW), own_channels & (kw < KW)
                place = (h.to(tl.int64) * xh + w.to(tl.int64) * xw)[:, None] + c[None, :]
                factors = ()
                for kd in tl.static_range(KD):
                    tap = weight + (at + kd * step_d + kh * step_h + kw * step_w) + c
                    factors = factors + (tl.load(tap, mask=own_channels, other=0.0).to(tl.float32)[None, :],)
                # A plane is read once, for all output planes that it reaches.
                for plane in tl.static_range((PLANES - 1) * SD + (KD - 1) * DD + 1):
                    d = first * SD + plane - PD
                    mask = (inside & (d >= 0) & (d < D))[:, None] & (c < C)[None, :]
                    values = tl.load(source + d.to(tl.int64) * xd + place, mask=mask, other=0.0).to(tl.float32)
                    for own in tl.static_range(PLANES):
                        for kd in tl.static_range(KD):
                            if plane == own * SD + kd * DD:
                                total = sums[own] + values * factors[kd]
                                sums = sums[:own] + (total,) + sums[own + 1 :]
    target = out + b.to(tl.int64) * ob
    place = (line.to(tl.int64) * oh + column.to(tl.int64) * ow)[:, None] + c[None, :]
    for own in tl.static_range(PLANES):
        d = first + own
        mask = ((line < OH) & (column < OW) & (d < OD))[:, None] & (c < C)[None, :]
        tl.store(target + d.to(tl.int64) * od + place, sums[own].to(out.dtype.element_ty), mask=mask)


@kernel()
def _depthwise_weight_kernel(
    x, gradient, out, C, D, H, W, OD, OH, OW, xb, xd, xh, xw, gb, gd, gh, gw, PD, PH, PW, NC, ND, NH, NW,
    tiles, per_program,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, COLUMNS: tl.constexpr,
    PLANES: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # Programs of the same voxels run side by side, and find them in the cache.
    groups: tl.constexpr = (KW + COLUMNS - 1) // COLUMNS
    group, rest = tl.program_id(0) % (KH * groups), tl.program_id(0) // (KH * groups)
    kh, first_kw = group // groups, group % groups * COLUMNS
    c, part = rest % NC * BC + tl.arange(0, BC), rest // NC
    sums = ()
    for _ in tl.static_range(KD * COLUMNS):
        sums = sums + (tl.zeros((BH * BW, BC), tl.float32),)
    for tile in range(part * per_program, tl.minimum((part + 1) * per_program, tiles)):
        b, first, line, column = _locate(tile, ND, NH, NW, PLANES, BH, BW)
        owed = (line < OH) & (column < OW)
        place = (line.to(tl.int64) * gh + column.to(tl.int64) * gw)[:, None] + c[None, :]
        slopes = ()
        for own in tl.static_range(PLANES):
            d = first + own
            mask = (owed & (d < OD))[:, None] & (c < C)[None, :]
            values = tl.load(gradient + b.to(tl.int64) * gb + d.to(tl.int64) * gd + place, mask=mask, other=0.0)
            slopes = slopes + (values.to(tl.float32),)
        h = line * SH + kh * DH - PH
        for index in tl.static_range(COLUMNS):
            w = column * SW + (first_kw + index) * DW - PW
            # Also outside the output: a non-finite voxel times a zero gradient is not zero.
            inside = owed & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            place = (h.to(tl.int64) * xh + w.to(tl.int64) * xw)[:, None] + c[None, :]
            for plane in tl.static_range((PLANES - 1) * SD + (KD - 1) * DD + 1):
                d = first * SD + plane - PD
                mask = (inside & (d >= 0) & (d < D))[:, None] & (c < C)[None, :]
                source = x + b.to(tl.int64) * xb + d.to(tl.int64) * xd
                values = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
                for own in tl.static_range(PLANES):
                    for kd in tl.static_range(KD):
                        if plane == own * SD + kd * DD:
                            total = sums[kd * COLUMNS + index] + values * slopes[own]
                            sums = sums[: kd * COLUMNS + index] + (total,) + sums[kd * COLUMNS + index + 1 :]
    for kd in tl.static_range(KD):
        for index in tl.static_range(COLUMNS):
            kw = first_kw + index
            row = ((part * KD + kd) * KH + kh) * KW + kw
            total = tl.sum(sums[kd * COLUMNS + index], 0)
            tl.store(out + row.to(tl.int64) * C + c, total, mask=(c < C) & (kw < KW))


def fits(weight: torch.Size, settings: Settings) -> bool:
    """Return whether a convolution with this weight, ``(C, 1, KD, KH, KW)``, is supported."""
    alone = weight[1] == 1 and settings.groups == weight[0]
    small = max(weight[2:]) <= MOST_TAPS and max(settings.dilation) <= MOST_DILATION
    # The taps that reach a voxel are every other one: they are as far apart in the output only where not dilated.
    strides = zip(settings.stride, settings.dilation, strict=True)
    return alone and small and all(s == 1 or (s <= MOST_STRIDE and d == 1) for s, d in strides)


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution of a slab, ``(B, C, D, H, W)`` in channels-last layout; other layouts are copied first."""
    sides = [
        (n - 1) * s - 2 * p + d * (k - 1) + extra + 1 if settings.transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, extra in zip(
            slab.shape[2:], weight.shape[2:], settings.stride, settings.padding, settings.dilation,
            settings.output_padding, strict=True,
        )
    ]  # fmt: skip
    return (_scatter if settings.transposed else _gather)(slab, weight, bias, sides, settings)


def input_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of a slab from that of the output, in channels-last layout."""
    return (_gather if settings.transposed else _scatter)(gradient, weight, None, slab.shape[2:], settings)


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the weight from that of the output."""
    coarse, fine = map(_lay_out, (slab, gradient) if settings.transposed else (gradient, slab))
    sides, kernel = coarse.shape[2:], weight.shape[2:]
    tile, counts = _choose_tile(coarse.shape[1], sides)
    tiles, columns = coarse.shape[0] * prod(counts[1:]), _count_columns(kernel)
    groups = kernel[1] * triton.cdiv(kernel[2], columns) * counts[0]
    per_program = triton.cdiv(tiles, max(1, 8 * count_processors(slab.device) // groups))
    parts = triton.cdiv(tiles, per_program)
    out = torch.empty((parts, *kernel, coarse.shape[1]), dtype=torch.float32, device=slab.device)
    # Planes that no output reads are uninitialised.
    numbers = zip(sides, kernel, settings.stride, settings.padding, settings.dilation, strict=True)
    ends = [(n - 1) * s - p + (k - 1) * d + 1 for n, k, s, p, d in numbers]
    read = map(min, ends, fine.shape[2:])
    _depthwise_weight_kernel[(parts * groups,)](
        fine, coarse, out, coarse.shape[1], *read, *sides, *_read_strides(fine), *_read_strides(coarse),
        *settings.padding, *counts, tiles, per_program, COLUMNS=columns,
        **_name_sides(kernel, settings.stride, settings.dilation), **tile, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out.sum(0).to(weight.dtype).movedim(-1, 0).reshape(weight.shape)


def _lay_out(volume: Tensor) -> Tensor:
    """Return a volume in channels-last layout; behind a head, or after joining planes, channels may be first."""
    return volume if volume.stride(1) == 1 else in_layout(volume, channels_last=True)


def _read_strides(volume: Tensor) -> tuple[int, ...]:
    """Return the strides of sample, plane, line and column."""
    return volume.stride(0), *volume.stride()[2:]


def _name_sides(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> dict[str, int]:
    """Return the constants for which the kernels are compiled, by name."""
    rows = zip("KSD", (kernel, stride, dilation), strict=True)
    return {letter + side: value for letter, values in rows for side, value in zip("DHW", values, strict=True)}


def _choose_tile(channels: int, sides: Sequence[int]) -> tuple[dict[str, int], list[int]]:
    """Return the tile, and the number of tiles along channels, planes, lines and columns."""
    width = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    voxels = ELEMENTS // width
    # As wide as high, or twice as wide.
    columns = min(1 << (voxels.bit_length() // 2), triton.next_power_of_2(sides[2]))
    lines = min(voxels // columns, triton.next_power_of_2(sides[1]))
    tile = {"PLANES": PLANES, "BH": lines, "BW": columns, "BC": width}
    return tile, [triton.cdiv(*pair) for pair in zip((channels, *sides), (width, PLANES, lines, columns), strict=True)]


def _count_columns(kernel: Sequence[int]) -> int:
    """Return the number of taps along W that are computed together, with all taps along D."""
    return max(1, min(kernel[2], MOST_UNROLLED // max(1, kernel[0])))


def _gather(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Sequence[int], settings: Settings) -> Tensor:
    """Return the convolution that is not transposed."""
    x, out = _lay_out(x), new_volume(x, x.shape[1], sides)
    _, height, width = kernel = weight.shape[2:]
    channels = len(weight)
    steps = height * width * channels, width * channels, channels
    _run(x, _by_taps(weight), bias, out, kernel, settings.stride, settings.padding, settings.dilation, 0, steps)
    return out


def _scatter(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Sequence[int], settings: Settings) -> Tensor:
    """Return the transposed convolution: for voxels of each remainder by the stride, from the taps that reach them.

    Tap ``k`` reaches voxel ``s q + r`` of the output from voxel ``(s q + r + p - d k) / s``, if that is an integer.
    """
    x, out, taps, ones = _lay_out(x), new_volume(x, x.shape[1], sides), _by_taps(weight), (1, 1, 1)
    *_, height, width = kernel = weight.shape[2:]
    units = height * width * len(weight), width * len(weight), len(weight)
    for remainders in product(*map(range, settings.stride)):
        part = out[:, :, *(slice(r, None, s) for r, s in zip(remainders, settings.stride, strict=True))]
        if part.numel() == 0:
            continue
        reaching, padding, at = [], [], 0
        numbers = zip(remainders, kernel, settings.stride, settings.padding, settings.dilation, units, strict=True)
        for r, k, s, p, d, unit in numbers:
            first = (r + p) % s
            count = len(range(first, k, s))
            reaching.append(count)
            padding.append(d * (count - 1) - (r + p - first) // s)
            at += (first + s * (count - 1)) * unit
        steps = [-s * unit for s, unit in zip(settings.stride, units, strict=True)]
        _run(x, taps, bias, part, reaching, ones, padding, settings.dilation, at, steps)
    return out


def _by_taps(weight: Tensor) -> Tensor:
    """Return the weights of all channels for one tap after the other."""
    return weight.flatten(1).t().contiguous()


def _run(
    x: Tensor, taps: Tensor, bias: Tensor | None, out: Tensor, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], at: int, steps: Sequence[int],
) -> None:  # fmt: skip
    """Write a convolution into ``out``; the first of its taps is at ``at``, the next along each side ``steps`` on."""
    tile, counts = _choose_tile(x.shape[1], out.shape[2:])
    _depthwise_kernel[(x.shape[0] * prod(counts),)](
        x, taps, taps if bias is None else bias, out, x.shape[1], *x.shape[2:], *out.shape[2:],
        *_read_strides(x), *_read_strides(out), *padding, *counts, at, *steps,
        COLUMNS=_count_columns(kernel), BIAS=bias is not None,
        **_name_sides(kernel, stride, dilation), **tile, num_warps=4, num_stages=1,
    )  # fmt: skip
