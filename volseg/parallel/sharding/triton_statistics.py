# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Statistics of the norms in Triton: moments of a slab, and what the shards' moments and gradient sums come to."""

import torch
from torch import Tensor

from volseg.parallel.sharding.triton_tiles import (
    even,
    launch_on,
    settings,
    spaced,
    split_voxels,
    tile_size,
    tl,
    triton,
    voxel_count,
)

if triton is not None:
    from volseg.parallel.sharding.triton_tiles import elements

__all__ = ["backward_coefficients", "coefficients", "moments"]

if triton is not None:

    @triton.jit
    def _moments_kernel(
        x,
        means,
        squares,
        C,
        V,
        per_program,
        sb,
        sc,
        sv,
        BV: tl.constexpr,
        BC: tl.constexpr,
    ):
        part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        c = block * BC + tl.arange(0, BC)
        inside = c < C
        start = part * per_program
        stop = tl.minimum(start + per_program, V)
        count = tl.zeros((BC,), tl.float32)
        mean = tl.zeros((BC,), tl.float32)
        square = tl.zeros((BC,), tl.float32)
        for first in range(start, stop, BV):
            v = first + tl.arange(0, BV)
            mask = (v[:, None] < stop) & inside[None, :]
            value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32)
            number = tl.minimum(stop - first, BV).to(tl.float32)
            own = tl.sum(value, 0) / number
            deviation = tl.where(mask, value - own[None, :], 0.0)
            # Chan's update: statistics of this tile joined to those so far.
            delta = own - mean
            total = count + number
            square += tl.sum(deviation * deviation, 0) + delta * delta * count * number / total
            mean += delta * number / total
            count = total
        place = (part * tl.num_programs(2) + b) * C + c
        tl.store(means + place, mean, mask=inside)
        tl.store(squares + place, square, mask=inside)

    @triton.jit
    def _join_kernel(
        means, squares, out, pairs, parts, V, per_program, PARTS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i[None, :] < pairs
        mean = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            mean += tl.sum(tl.where(there, own * number[:, None], 0.0), 0)
        mean = mean / (V * 1.0)
        square = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            delta = own - mean[None, :]
            within = tl.load(squares + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            square += tl.sum(tl.where(there, within + delta * delta * number[:, None], 0.0), 0)
        tl.store(out + i, mean, mask=i < pairs)
        tl.store(out + pairs + i, square / (V * 1.0), mask=i < pairs)

    @triton.jit
    def _coefficients_kernel(
        stacked, shares, weight, bias, out, eps, C, pairs, shards,
        WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < pairs
        mean = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            mean += tl.load(shares + shard) * tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0)
        variance = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            share = tl.load(shares + shard)
            delta = tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0) - mean
            own = tl.load(stacked + (shard * 2 + 1) * pairs + i, mask=inside, other=0.0)
            variance += share * (own + delta * delta)
        rstd = 1.0 / tl.sqrt_rn(variance + eps)
        scale = rstd
        if WEIGHT:
            scale *= tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
        shift = -mean * scale
        if BIAS:
            shift += tl.load(bias + i % C, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + i, mean, mask=inside)
        tl.store(out + pairs + i, variance, mask=inside)
        tl.store(out + 2 * pairs + i, rstd, mask=inside)
        tl.store(out + 3 * pairs + i, scale, mask=inside)
        tl.store(out + 4 * pairs + i, shift, mask=inside)

    @triton.jit
    def _backward_kernel(
        stacked, mean, rstd, weight, out, voxels, C, pairs, shards,
        WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < pairs
        total = tl.zeros((BLOCK,), tl.float32)
        moment = tl.zeros((BLOCK,), tl.float32)
        for shard in range(shards):
            total += tl.load(stacked + shard * 2 * pairs + i, mask=inside, other=0.0)
            moment += tl.load(stacked + (shard * 2 + 1) * pairs + i, mask=inside, other=0.0)
        m = tl.load(mean + i, mask=inside, other=0.0)
        r = tl.load(rstd + i, mask=inside, other=0.0)
        moment *= r
        w = tl.full((BLOCK,), 1.0, tl.float32)
        if WEIGHT:
            w = tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
        slope = -r * r * moment * w / voxels
        offset = -r * total * w / voxels - slope * m
        tl.store(out + i, slope, mask=inside)
        tl.store(out + pairs + i, offset, mask=inside)
        tl.store(out + 2 * pairs + i, moment, mask=inside)
        tl.store(out + 3 * pairs + i, total, mask=inside)


def moments(slab: Tensor) -> Tensor:
    """See ``kernels.moments``."""
    slab = even(slab, slab)
    batch, channels = slab.shape[:2]
    tile = tile_size(slab)
    parts, per_program = split_voxels(slab, tile)
    means, squares = slab.new_empty((2, parts, batch, channels), dtype=torch.float32)
    out = slab.new_empty((2, batch, channels), dtype=torch.float32)
    with launch_on(slab):
        grid = (parts, triton.cdiv(channels, tile[1]), batch)
        _moments_kernel[grid](
            slab, means, squares, channels, voxel_count(slab), per_program, *spaced(slab), **settings(tile)
        )
        pairs = batch * channels
        grid = (triton.cdiv(pairs, 8), 1, 1)
        _join_kernel[grid](
            means, squares, out, pairs, parts, voxel_count(slab), per_program, PARTS=128, BLOCK=8, num_warps=4
        )
    return out


def coefficients(stacked: Tensor, shares: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See ``kernels.coefficients``."""
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((5, batch, channels))
    with launch_on(stacked):
        _coefficients_kernel[(triton.cdiv(pairs, 128),)](
            stacked, shares, weight, bias, out, eps, channels, pairs, shards,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def backward_coefficients(stacked: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, voxels: int) -> Tensor:
    """See ``kernels.backward_coefficients``."""
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((4, batch, channels))
    with launch_on(stacked):
        _backward_kernel[(triton.cdiv(pairs, 128),)](
            stacked, mean, rstd, weight, out, float(voxels), channels, pairs, shards,
            WEIGHT=weight is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out
