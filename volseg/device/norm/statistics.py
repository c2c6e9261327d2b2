# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Statistics of a slab in Triton: its moments, part by part, and what the parts come to."""

import torch
from torch import Tensor

from volseg.device.norm.grouping import LANES, TILE, find_pairs, join_lanes
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import (
    choose_tile,
    count_voxels,
    describe_tile,
    elements,
    make_even,
    read_strides,
    select_device,
    split_voxels,
)

__all__ = ["compute_moments_of_parts", "join_parts", "moments"]

JOIN = {"PARTS": TILE // LANES, "BLOCK": LANES, "num_warps": 4}
"""Parts of a slab and pairs of sample and channel that a program joins."""


@kernel()
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
def join_parts(
    means, squares, groups, members, steps, pairs, parts, V, per_program,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return mean and biased variance of a program's groups over all parts of the slab."""
    voxels = V * 1.0 * members
    mean = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        i, inside = find_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside[None, :]
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            mean += tl.sum(tl.where(there, own * number[:, None], 0.0), 0)
    mean = join_lanes(mean, ACROSS) / voxels
    square = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        i, inside = find_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside[None, :]
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            delta = own - mean[None, :]
            within = tl.load(squares + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            square += tl.sum(tl.where(there, within + delta * delta * number[:, None], 0.0), 0)
    return mean, join_lanes(square, ACROSS) / voxels


@kernel()
def _join_kernel(
    means, squares, out, pairs, parts, V, per_program, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, inside = find_pairs(0, pairs, 1, False, BLOCK)
    mean, variance = join_parts(means, squares, pairs, 1, 1, pairs, parts, V, per_program, False, PARTS, BLOCK)
    tl.store(out + i, mean, mask=inside)
    tl.store(out + pairs + i, variance, mask=inside)


def compute_moments_of_parts(slab: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and sum of squares of each part of the slab, ``(parts, B, C)``, and the voxels of a part."""
    batch, channels = slab.shape[:2]
    tile = choose_tile(slab)
    parts, per_program = split_voxels(slab, tile)
    means, squares = slab.new_empty((2, parts, batch, channels), dtype=torch.float32)
    with select_device(slab):
        grid = (parts, triton.cdiv(channels, tile[1]), batch)
        _moments_kernel[grid](
            slab, means, squares, channels, count_voxels(slab), per_program, *read_strides(slab), **describe_tile(tile)
        )
    return means, squares, per_program


def moments(slab: Tensor) -> Tensor:
    """Compute ``reference.moments``."""
    slab = make_even(slab, slab)
    means, squares, per_program = compute_moments_of_parts(slab)
    parts, batch, channels = means.shape
    pairs = batch * channels
    out = slab.new_empty((2, batch, channels), dtype=torch.float32)
    with select_device(slab):
        _join_kernel[(triton.cdiv(pairs, LANES),)](
            means, squares, out, pairs, parts, count_voxels(slab), per_program, **JOIN
        )  # fmt: skip
    return out
