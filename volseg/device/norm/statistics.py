# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Statistics of a slab in Triton: the moments of its parts, and their combination."""

import torch
from torch import Tensor

from volseg.device import triton_tiles
from volseg.device.norm.grouping import LANES, TILE, compute_pairs, join_lanes
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import (
    choose_tile,
    count_voxels,
    describe_tile,
    elements,
    halve,
    is_narrow,
    make_even,
    read_strides,
    split_voxels,
)

JOIN = {"PARTS": TILE // LANES, "BLOCK": LANES, "num_warps": 4}
"""Parts of a slab and pairs of sample and channel that a program joins."""


@kernel()
def _moments_kernel(
    x, means, squares, C, V, per_program, sb, sc, sv, BV: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    inside = c < C
    start = part * per_program
    stop = tl.minimum(start + per_program, V)
    # Relative to the part's first voxel: means far from 0 would be rounded in each iteration.
    origin = tl.load(x + b.to(tl.int64) * sb + c.to(tl.int64) * sc + start.to(tl.int64) * sv, mask=inside, other=0.0)
    origin = origin.to(tl.float32)
    # Each place of the tile keeps the mean and squares of its own voxels, so that threads wait for each other only at
    # the end.
    mean = tl.zeros((BV, BC), tl.float32)
    square = tl.zeros((BV, BC), tl.float32)
    whole = (stop - start) // BV
    turns = 0.0
    for turn in tl.range(0, whole, num_stages=STAGES):
        v = start + turn * BV + tl.arange(0, BV)
        value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=inside[None, :], other=0.0).to(tl.float32)
        value -= origin[None, :]
        turns += 1.0
        delta = value - mean  # Welford's update
        mean += delta * (1.0 / turns)
        square += delta * (value - mean)
    v = start + whole * BV + tl.arange(0, BV)  # in the last part some places, or all, have no voxel left
    there = v < stop
    mask = there[:, None] & inside[None, :]
    value = tl.load(x + elements(sb, sc, sv, b, c, v), mask=mask, other=0.0).to(tl.float32) - origin[None, :]
    delta = tl.where(mask, value - mean, 0.0)
    mean += delta * (1.0 / (turns + 1.0))
    square += tl.where(mask, delta * (value - mean), 0.0)
    # Chan's formula: join the statistics of the places; a place without a voxel counts 0 times.
    count = tl.where(there, turns + 1.0, turns)[:, None]
    own = tl.sum(mean * count, 0) / (stop - start).to(tl.float32)
    delta = mean - own[None, :]
    square = tl.sum(square + delta * delta * count, 0)
    place = (part * tl.num_programs(2) + b) * C + c
    tl.store(means + place, origin + own, mask=inside)
    tl.store(squares + place, square, mask=inside)


@triton.jit
def join_parts(
    means, squares, groups, members, steps, pairs, parts, V, per_program,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return mean and biased variance of a program's groups over all parts of the slab.

    Over a batch the samples of a part follow each other in memory, as the parts do: all are rows of one matrix.
    """
    voxels = V * 1.0 * members
    samples, turns, pitch = members, 1, groups
    if ACROSS:
        samples, turns, pitch = 1, steps, pairs
    mean = tl.zeros((PARTS, BLOCK), tl.float32)
    for step in range(turns):
        i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts * samples, PARTS):
            row = first + tl.arange(0, PARTS)
            there = (row[:, None] < parts * samples) & inside[None, :]
            number = tl.minimum(V - row // samples * per_program, per_program).to(tl.float32)
            own = tl.load(means + row[:, None] * pitch + i[None, :], mask=there, other=0.0)
            mean += tl.where(there, own * number[:, None], 0.0)
    mean = join_lanes(tl.sum(mean, 0), ACROSS) / voxels
    square = tl.zeros((PARTS, BLOCK), tl.float32)
    for step in range(turns):
        i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts * samples, PARTS):
            row = first + tl.arange(0, PARTS)
            there = (row[:, None] < parts * samples) & inside[None, :]
            number = tl.minimum(V - row // samples * per_program, per_program).to(tl.float32)
            own = tl.load(means + row[:, None] * pitch + i[None, :], mask=there, other=0.0)
            delta = own - mean[None, :]
            within = tl.load(squares + row[:, None] * pitch + i[None, :], mask=there, other=0.0)
            square += tl.where(there, within + delta * delta * number[:, None], 0.0)
    return mean, join_lanes(tl.sum(square, 0), ACROSS) / voxels


@kernel()
def _join_kernel(
    means, squares, out, pairs, parts, V, per_program, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, inside = compute_pairs(0, pairs, 1, False, BLOCK)
    mean, variance = join_parts(means, squares, pairs, 1, 1, pairs, parts, V, per_program, False, PARTS, BLOCK)
    tl.store(out + i, mean, mask=inside)
    tl.store(out + pairs + i, variance, mask=inside)


def compute_moments_of_parts(slab: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and sum of squares of each part of the slab, ``(parts, B, C)``, and the voxels of a part."""
    batch, channels = slab.shape[:2]
    tile = choose_tile(slab)
    tile = halve(tile) if is_narrow(slab, tile) else tile
    parts, per_program = split_voxels(slab, tile)
    means, squares = slab.new_empty((2, parts, batch, channels), dtype=torch.float32)
    grid = (parts, triton.cdiv(channels, tile[1]), batch)
    _moments_kernel[grid](
        slab, means, squares, channels, count_voxels(slab), per_program, *read_strides(slab),
        **describe_tile(tile, STAGES=triton_tiles.STAGES),
    )  # fmt: skip
    return means, squares, per_program


def moments(slab: Tensor) -> Tensor:
    """Compute ``reference.moments``."""
    slab = make_even(slab, slab)
    means, squares, per_program = compute_moments_of_parts(slab)
    parts, batch, channels = means.shape
    pairs = batch * channels
    out = slab.new_empty((2, batch, channels), dtype=torch.float32)
    _join_kernel[(triton.cdiv(pairs, LANES),)](
        means, squares, out, pairs, parts, count_voxels(slab), per_program, **JOIN
    )  # fmt: skip
    return out
