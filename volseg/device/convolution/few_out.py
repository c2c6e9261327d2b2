# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Convolution of many channels to few in half precision, channels-last layout, such as a V-Net's last one of 5 x 5 x 5.

cuDNN multiplies tiles of 32 output channels, even if there are few. Here the taps along W also take the place of
channels: ``z[u, (kw, n)]``, summed over the taps along D and H and over the input channels, is a matrix product with
nearly all columns in use, and ``out[w, n]`` is the sum of ``z[w + kw, (kw, n)]`` over ``kw``. The program that writes
``z`` also computes these sums, from the caches.

Its gradients are those of a convolution of few channels to many, ``few_in``, from the output back to the input.
"""

from math import prod

import torch
from torch import Tensor

from volseg.device.convolution import few_in
from volseg.device.convolution.settings import Settings, new_volume
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_processors

CHANNELS = (16, 32, 64)
"""Supported input channels: a row of one tap is read whole."""

FEWEST_TAPS = 27
"""Fewest taps of one channel: fewer were not measured."""

VOXELS, WARPS, STAGES = 128, 4, 3
"""Tile forward."""

PROGRAMS = 8
"""Programs per multiprocessor, each with its own memory for sums."""


def keeps_width(weight: Tensor, padding: tuple[int, ...]) -> bool:
    """Return whether lines of the output are as long as those of the input."""
    return 2 * padding[2] + 1 == weight.shape[4]


@kernel(do_not_specialize=["V", "D", "H", "OD", "OH"])
def _forward_kernel(
    x, weight, bias, room, out, V, D, H, W, OD, OH, sb, sd, sh, sw, PD, PH,
    C: tl.constexpr, N: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr,
    BV: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    before: tl.constexpr = KW // 2
    results: tl.constexpr = BV - KW + 1
    r, c, j, n = tl.arange(0, BV), tl.arange(0, C), tl.arange(0, BN), tl.arange(0, BO)
    own = room + tl.program_id(0).to(tl.int64) * (BV * BN)
    for first in range(tl.program_id(0) * results, V, tl.num_programs(0) * results):
        u = first + r - before
        there = (u >= 0) & (u < V)
        u = tl.maximum(u, 0)
        line = u // W
        plane = line // OH
        d, h = plane % OD - PD, line % OH - PH
        place = (plane // OD).to(tl.int64) * sb + d.to(tl.int64) * sd + h.to(tl.int64) * sh + (u % W).to(tl.int64) * sw
        total = tl.zeros((BV, BN), tl.float32)
        for tap in range(KD * KH):
            kd, kh = tap // KH, tap % KH
            inside = there & (d + kd >= 0) & (d + kd < D) & (h + kh >= 0) & (h + kh < H)
            rows = x + (place + tl.cast(kd, tl.int64) * sd + tl.cast(kh, tl.int64) * sh)
            values = tl.load(rows[:, None] + c[None, :], mask=inside[:, None], other=0.0)
            columns = weight + (tap * C + c[:, None]) * (KW * N) + j[None, :]
            total = tl.dot(values, tl.load(columns, mask=(j < KW * N)[None, :], other=0.0), total)
        tl.store(own + r[:, None] * BN + j[None, :], total)
        tl.debug_barrier()  # other threads have written the values read below
        v = first + r
        w = v % W
        summed = tl.zeros((BV, BO), tl.float32)
        for kw in tl.static_range(KW):
            shares = (r < results) & (w + kw >= before) & (w + kw < W + before)
            part = own + (r + kw)[:, None] * BN + kw * N + n[None, :]
            summed += tl.load(part, mask=shares[:, None] & (n < N)[None, :], other=0.0)
        if BIAS:
            summed += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        place = out + v.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, summed.to(out.dtype.element_ty), mask=((r < results) & (v < V))[:, None] & (n < N)[None, :])
        tl.debug_barrier()  # the next tile overwrites this one


def _count_columns(weight: Tensor) -> int:
    return max(16, triton.next_power_of_2(weight.shape[0] * weight.shape[4]))


def forward(slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Return the convolution, ``(B, N, D, H, W)``, of a slab; both in channels-last layout; see `keeps_width`."""
    sides = settings.compute_sides(slab, weight)
    out, voxels = new_volume(slab, weight.shape[0], sides), slab.shape[0] * prod(sides)
    columns = _count_columns(weight)
    tiles = triton.cdiv(voxels, VOXELS - weight.shape[4] + 1)
    programs = min(tiles, PROGRAMS * count_processors(slab.device))
    room = torch.empty((programs, VOXELS, columns), dtype=torch.float32, device=slab.device)
    sb, _, sd, sh, sw = slab.stride()
    _forward_kernel[(programs,)](
        slab, weight.permute(2, 3, 1, 4, 0).flatten(0, 1).contiguous(), bias, room, out, voxels,
        *slab.shape[2:], *sides[:2], sb, sd, sh, sw, *settings.padding[:2],
        **dict(zip(("N", "C", "KD", "KH", "KW"), weight.shape, strict=True)), BIAS=bias is not None,
        BV=VOXELS, BN=columns, BO=triton.next_power_of_2(weight.shape[0]), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def input_gradient(gradient: Tensor, _slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the input, with channels last, from that of the output, whose lines are dense."""
    return few_in.forward(gradient, weight.flip(2, 3, 4).transpose(0, 1), None, settings.turn(weight))


def weight_gradient(gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Return the gradient of the weight from that of the output, whose lines are dense; the slab's channels are last.

    It equals the flipped gradient of a convolution from the output's gradient to the slab, for at most 64 channels of
    the slab at a time.
    """
    count = -(-weight.shape[1] // few_in.MOST_CHANNELS)
    parts = zip(slab.chunk(count, 1), weight.chunk(count, 1), strict=True)
    turned = settings.turn(weight)
    found = [few_in.weight_gradient(volume, gradient, part.transpose(0, 1), turned) for volume, part in parts]
    return torch.cat(found).transpose(0, 1).flip(2, 3, 4)
