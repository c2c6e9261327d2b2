# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Gradient of weights of 5 x 5 x 5 taps, in half precision with channels last.

A matrix product of ``(channels out, voxels)`` with ``(voxels, channels in)`` for each tap, over all voxels of the slab,
in Triton. For some sizes of 128 channels or more cuDNN chooses slow kernels, and a trial of all its algorithms finds no
better one: on an H200 21 TFLOP/s for 256 channels of any size. This kernel reaches 440 to 520 on an H100.

For 32 and 64 channels, the voxels of a group along W with their contiguous channels fill a tile of 128 rows, as in
``space_to_channels``. A tap of a group is a run of voxels, whose channels are contiguous as well::

    4 voxels of a group, 32 channels           128 rows           g0 g1 g2 g3
    runs of voxels under taps 0 to 4    2 x 128 columns        x0 x1 x2 x3 | x4 x5 x6 x7

so that all taps along W are two products, and the result is the sum of entries ``(v, v + t)`` over the voxels of a
group. This is 8 / 5 of the work, and takes a quarter less time than cuDNN over pairs.

References
----------
Measured: workflows/benchmarks/results/convolution_h100_many_taps.json, of cuDNN convolution_h200_wide_kernels.json.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings
from volseg.device.gpus import get_capability, is_gpu
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import DIVIDERS, compute_dividers, count_processors, locate

FEWEST_TAPS, FEWEST_CHANNELS = 125, 128
"""Fewest taps and channels: below, cuDNN is faster, except for ``GROUPS``."""

FEWEST_VOXELS = 4096
"""Fewest voxels of the forward convolution with flipped weights: below, cuDNN's own kernel is as fast."""

ALWAYS_TURNED = 256
"""Channels from which cuDNN's own kernel takes twice as long even for few voxels."""

GROUPS = {32: 4, 64: 2}
"""Voxels of a group along W, by the channels in and out that were measured."""

FEWEST_VOXELS_OF_GROUPS = 32**3
"""Fewest voxels of groups, measured."""

BV, BI, BO = 64, 128, 128
"""Voxels, columns and rows of a tile."""

WIDE = 9
"""Compute capability of the GPUs on which a program computes two tiles that share their inputs: two of rows, or of
columns. They need 144 KiB of shared memory. On others two programs share a processor instead, and groups of voxels were
not measured."""

FEWEST_TILES, FEWEST_TILES_OF_WAVES = 8, 64
"""Fewest tiles that a program sums up, and fewest if there are more programs than run at a time."""

MOST_WAVES, FULL = 4, 0.96
"""Limit of waves of programs, and the sufficient share of busy processors."""

NOT_SPECIALIZED = ["V", "per_part", "D", "H", "W", "OD", "OH", "OW", "PD", "PH", "PW", *DIVIDERS]
"""Arguments whose divisibility by 16 changes no instruction; another patch size would need another compilation."""


@triton.jit
def _load_under(
    x, row, live, d, h, w, c, tap, D, H, W, sd, sh, sw,
    CI: tl.constexpr, KH: tl.constexpr, RUNS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Return the input under a run of taps of some voxels of the output, ``[BV, BI]``."""
    kd, kh, kw = tap // (KH * RUNS), tap // RUNS % KH, tap % RUNS * ALONG
    # One unsigned comparison checks whether a coordinate is inside on both sides.
    inside = live & ((d + kd).to(tl.uint32) < D.to(tl.uint32)) & ((h + kh).to(tl.uint32) < H.to(tl.uint32))
    if ALONG == 1:
        there = (inside & ((w + kw).to(tl.uint32) < W.to(tl.uint32)))[:, None] & (c < CI)[None, :]
    else:
        along = (w + kw)[:, None] + (c // CI)[None, :]
        there = inside[:, None] & (along.to(tl.uint32) < W.to(tl.uint32))
    delta = kd * sd + kh * sh + kw * sw
    return tl.load(x + delta + row[:, None] + c[None, :], mask=there, other=0.0)


@kernel(do_not_specialize=NOT_SPECIALIZED)
def _weight_kernel(
    x, gradient, out, V, per_part, D, H, W, OD, OH, OW, sb, sd, sh, sw, PD, PH, PW,
    mul_w, shr_w, mul_h, shr_h, mul_d, shr_d,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, RUNS: tl.constexpr, TAPS: tl.constexpr,
    GROUP: tl.constexpr, ALONG: tl.constexpr,
    BV: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (CI + BI - 1) // BI
    tap, part = tl.program_id(0) // tiles * BT, tl.program_id(2)
    c = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    co = tl.program_id(1) * BO + tl.arange(0, BO)
    stop = tl.minimum((part + 1) * per_part, V)
    one = tl.zeros((BO, BI), tl.float32)
    two = tl.zeros((BO, BI), tl.float32)
    for first in range(part * per_part, stop, BV):
        v = first + tl.arange(0, BV)
        live = v < stop
        b, d, h, w = locate(v, OD, OH, OW, mul_w, shr_w, mul_h, shr_h, mul_d, shr_d)
        d, h, w = d - PD, h - PH, w * GROUP - PW
        row = b.to(tl.int64) * sb + (d * sd + h * sh + w * sw)
        place = gradient + v.to(tl.int64)[:, None] * CO + co[None, :]
        slopes = tl.trans(tl.load(place, mask=live[:, None] & (co < CO)[None, :], other=0.0))
        under = _load_under(x, row, live, d, h, w, c, tap, D, H, W, sd, sh, sw, CI, KH, RUNS, ALONG)
        one = tl.dot(slopes, under, one)
        if BT == 2:
            more = live & (tap + 1 < TAPS)
            under = _load_under(x, row, more, d, h, w, c, tap + 1, D, H, W, sd, sh, sw, CI, KH, RUNS, ALONG)
            two = tl.dot(slopes, under, two)
    width: tl.constexpr = CI * ALONG
    fits = (co < CO)[:, None] & (c < width)[None, :]
    place = out + ((part * CO + co).to(tl.int64)[:, None] * TAPS + tap) * width + c[None, :]
    tl.store(place, one.to(out.dtype.element_ty), mask=fits)
    if BT == 2:
        tl.store(place + width, two.to(out.dtype.element_ty), mask=fits & (tap + 1 < TAPS))


def can_read(slab: Tensor, kernel: Sequence[int]) -> bool:
    """Return whether the channels of a voxel are contiguous, and 32 bits count a sample's elements.

    Elements around it count as well: the kernel's reach is subtracted from addresses, and added to them.
    """
    along = zip(slab.shape[2:], kernel, slab.stride()[2:], strict=True)
    return slab.stride(1) == 1 and sum((side + 3 * taps) * way for side, taps, way in along) < 2**31


def can_group(slab: Tensor, kernel: Sequence[int], width: int, voxels: int) -> bool:
    """Return whether groups of voxels of the slab can be read in the same way, for an output of some width."""
    return can_read(slab, kernel) and slab.stride(4) == slab.shape[1] and width % voxels == 0


def count_group(weight: Tensor) -> int:
    """Return the number of voxels along W in a group for the gradient of this weight; 1 for no groups."""
    return GROUPS.get(weight.shape[1], 1)


def weight_gradient(
    gradient: Tensor, slab: Tensor, weight: Tensor, settings: Settings, voxels: int | None = None
) -> Tensor:
    """Return the gradient of the weight from that of the output; channels are last in all three.

    Parameters
    ----------
    gradient, slab, weight, settings
        Tensors and settings of a convolution without strides; see ``can_read``.
    voxels
        Voxels of a group along W, by default ``count_group``; for more than one see ``can_group``: the input channels
        must divide 128.
    """
    voxels = count_group(weight) if voxels is None else voxels
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
    out, own, *kernel = weight.shape
    along = BI // own if voxels > 1 else 1
    runs = triton.cdiv(kernel[2] + voxels - 1, along)
    rows, taps, wide = voxels * out, kernel[0] * kernel[1] * runs, along * own
    sides = (*gradient.shape[2:4], gradient.shape[4] // voxels)
    tile, at_a_time = _choose_tile(rows, slab.device)
    columns = triton.cdiv(taps, tile["BT"]) * triton.cdiv(wide, BI), triton.cdiv(rows, tile["BO"])
    places = gradient.shape[0] * prod(sides)
    wanted = _count_parts(prod(columns), at_a_time, places // BV)
    per_part = triton.cdiv(triton.cdiv(places, wanted), BV) * BV
    parts = triton.cdiv(places, per_part)
    dtype = weight.dtype if parts * voxels == 1 else torch.float32
    found = torch.empty((parts, rows, *kernel[:2], runs, wide), dtype=dtype, device=slab.device)
    sb, _, *ways = slab.stride()
    _weight_kernel[(*columns, parts)](
        slab, gradient, found, places, per_part, *slab.shape[2:], *sides,
        sb if slab.shape[0] > 1 else 0, *ways, *settings.padding, *compute_dividers(sides),
        CI=own, CO=rows, KH=kernel[1], RUNS=runs, TAPS=taps, GROUP=voxels, ALONG=along,
        BV=BV, BI=BI, **tile, num_warps=8, num_stages=3,
    )  # fmt: skip
    # Tap t of a group's voxel v is voxel v + t of its run: a sum over shifted views.
    part, row, depth, height, *_ = found.stride()
    shape = (parts, voxels, out, *kernel, own)
    shifted = found.as_strided(shape, (part, out * row + own, row, depth, height, own, 1))
    summed = shifted[0, 0] if parts * voxels == 1 else shifted.sum((0, 1)).to(weight.dtype)
    return summed.permute(0, 4, 1, 2, 3)


def _choose_tile(rows: int, device: torch.device) -> tuple[dict[str, int], int]:
    """Return rows and taps of a program, and the number of programs that run at a time."""
    processors = count_processors(device)
    if not (is_gpu(device) and get_capability(device)[0] == WIDE):
        return {"BO": BO, "BT": 1}, 2 * processors
    return {"BO": 2 * BO, "BT": 1} if rows % (2 * BO) == 0 else {"BO": BO, "BT": 2}, processors


def _count_parts(results: int, at_a_time: int, tiles: int) -> int:
    """Return the number of programs among which the voxels of each result are divided.

    They form whole waves, as few as leave hardly any processor idle.
    """
    best, fullest = 1, 0.0
    for waves in range(1, MOST_WAVES + 1):
        parts = max(1, waves * at_a_time // results)
        if waves > 1 and parts * FEWEST_TILES_OF_WAVES > tiles:
            break
        parts = max(1, min(parts, tiles // FEWEST_TILES))
        taken = parts * results
        full = taken / (at_a_time * -(-taken // at_a_time))
        if full > fullest:
            best, fullest = parts, full
        if full >= FULL:
            break
    return best
