# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Statistics of the norms in Triton: moments of a slab, and what the shards' moments and gradient sums come to."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device.norm.grouping import ALONE, LANES, TILE, Grouping, PairBlocks
from volseg.device.norm.running import Running
from volseg.device.peer.values import CAPACITY, ValueMailbox, count, get, put
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

__all__ = [
    "backward_coefficients",
    "coefficients",
    "exchange_backward_coefficients",
    "exchange_coefficients",
    "given_coefficients",
    "moments",
]

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
def _find_pairs(step, groups, members, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the pairs that a program takes in a step, and which of them there are: see ``PairBlocks``."""
    lane = tl.arange(0, BLOCK)
    if ACROSS:
        channel = step * BLOCK + lane
        i = tl.program_id(0) * members + channel
        inside = channel < members
    else:
        group = tl.program_id(0) * BLOCK + lane
        i = step * groups + group
        inside = group < groups
    return i, inside


@triton.jit
def _find_slots(groups, ACROSS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of a program's groups, which of its lanes speak for one, and which listen."""
    lane = tl.arange(0, BLOCK)
    if ACROSS:
        slot = tl.program_id(0) + 0 * lane
        speaks = lane == 0
        listens = lane >= 0
    else:
        slot = tl.program_id(0) * BLOCK + lane
        speaks = slot < groups
        listens = speaks
    return slot, speaks, listens


@triton.jit
def _join_lanes(values, ACROSS: tl.constexpr):
    """Return the sums over the members that the lanes hold, on all of them."""
    if ACROSS:
        values = tl.broadcast_to(tl.sum(values, 0), values.shape)
    return values


@triton.jit
def _join_parts(
    means, squares, groups, members, steps, pairs, parts, V, per_program,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return mean and biased variance of a program's groups over all parts of the slab."""
    voxels = V * 1.0 * members
    mean = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside[None, :]
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            mean += tl.sum(tl.where(there, own * number[:, None], 0.0), 0)
    mean = _join_lanes(mean, ACROSS) / voxels
    square = tl.zeros((BLOCK,), tl.float32)
    for step in range(steps):
        i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            there = (part[:, None] < parts) & inside[None, :]
            number = tl.minimum(V - part * per_program, per_program).to(tl.float32)
            own = tl.load(means + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            delta = own - mean[None, :]
            within = tl.load(squares + part[:, None] * pairs + i[None, :], mask=there, other=0.0)
            square += tl.sum(tl.where(there, within + delta * delta * number[:, None], 0.0), 0)
    return mean, _join_lanes(square, ACROSS) / voxels


@triton.jit
def _sum_parts(partials, i, inside, pairs, parts, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first two sums of the pairs ``i`` over all parts of the slab, each of which has ``rows`` of them."""
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part[:, None] < parts) & inside[None, :]
        place = partials + part[:, None] * rows * pairs + i[None, :]
        total += tl.sum(tl.load(place, mask=there, other=0.0), 0)
        moment += tl.sum(tl.load(place + pairs, mask=there, other=0.0), 0)
    return total, moment


@triton.jit
def _store_coefficients(
    mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
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
def _keep_gradients(
    total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT: tl.constexpr
):  # fmt: skip
    """Store the gradients of bias and weight of the pairs ``i``; return what they add to their groups' sums."""
    moment *= tl.load(rstd + i, mask=inside, other=0.0)
    tl.store(out + 2 * pairs + i, moment, mask=inside)
    tl.store(out + 3 * pairs + i, total, mask=inside)
    if WEIGHT:
        w = tl.load(weight + i % C, mask=inside, other=0.0).to(tl.float32)
        total *= w
        moment *= w
    return total, moment


@triton.jit
def _store_backward(
    first, second, mean, rstd, out, voxels, groups, members, steps, pairs,
    ACROSS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = _join_lanes(first, ACROSS) / members
    second = _join_lanes(second, ACROSS) / members
    for step in range(steps):
        i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
        m = tl.load(mean + i, mask=inside, other=0.0)
        r = tl.load(rstd + i, mask=inside, other=0.0)
        slope = -r * r * second / voxels
        offset = -r * first / voxels - slope * m
        if GIVEN:  # statistics that do not come from the input have no gradient to it
            slope = tl.zeros((BLOCK,), tl.float32)
            offset = slope
        tl.store(out + i, slope, mask=inside)
        tl.store(out + pairs + i, offset, mask=inside)


@kernel()
def _join_kernel(
    means, squares, out, pairs, parts, V, per_program, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, inside = _find_pairs(0, pairs, 1, False, BLOCK)
    mean, variance = _join_parts(means, squares, pairs, 1, 1, pairs, parts, V, per_program, False, PARTS, BLOCK)
    tl.store(out + i, mean, mask=inside)
    tl.store(out + pairs + i, variance, mask=inside)


@kernel()
def _given_kernel(
    mean, variance, weight, bias, out, eps, C, pairs, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < pairs
    m = tl.load(mean + i % C, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(variance + i % C, mask=inside, other=0.0).to(tl.float32)
    _store_coefficients(m, v, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)


@kernel()
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
    _store_coefficients(mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)


@kernel()
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
    first, second = _keep_gradients(total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT)
    _store_backward(first, second, mean, rstd, out, voxels, pairs, 1, 1, pairs, False, False, BLOCK)


@kernel(do_not_specialize=["rank", "patience"])
def _exchange_coefficients_kernel(
    means, squares, shares, weight, bias, out, running_mean, running_var, momentum, bessel, eps,
    C, groups, members, steps, pairs, parts, V, per_program, boxes, calls, rank, patience,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr, SHARDS: tl.constexpr, CAPACITY: tl.constexpr,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mean, variance = _join_parts(
        means, squares, groups, members, steps, pairs, parts, V, per_program, ACROSS, PARTS, BLOCK
    )
    slot, speaks, listens = _find_slots(groups, ACROSS, BLOCK)
    if SHARDS > 1:
        call = (tl.load(calls) + 1).to(tl.int64)
        put(mean, slot, speaks, boxes, call, rank, SHARDS, CAPACITY)
        put(variance, groups + slot, speaks, boxes, call, rank, SHARDS, CAPACITY)
        tl.debug_barrier()  # nothing that is sent may wait for what is awaited
        mean = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SHARDS):
            share = tl.load(shares + peer)
            mean += share * get(slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
        variance = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SHARDS):
            share = tl.load(shares + peer)
            delta = get(slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY) - mean
            own = get(groups + slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            variance += share * (own + delta * delta)
        count(calls, call)
    for step in range(steps):
        i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
        _store_coefficients(mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)
    if RUNNING:
        old = tl.load(running_mean + slot, mask=speaks, other=0.0)
        tl.store(running_mean + slot, old + momentum * (mean - old), mask=speaks)
        old = tl.load(running_var + slot, mask=speaks, other=0.0)
        tl.store(running_var + slot, old + momentum * (variance - old) + bessel * variance, mask=speaks)


@kernel(do_not_specialize=["rank", "patience"])
def _exchange_backward_kernel(
    partials, mean, rstd, weight, out, voxels, C, groups, members, steps, pairs, parts, rows,
    boxes, calls, rank, patience, WEIGHT: tl.constexpr, SHARDS: tl.constexpr, CAPACITY: tl.constexpr,
    ACROSS: tl.constexpr, GIVEN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    call = tl.full((), 0, tl.int64)
    if SHARDS > 1:
        call = (tl.load(calls) + 1).to(tl.int64)
    for step in range(steps):
        i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
        total, moment = _sum_parts(partials, i, inside, pairs, parts, rows, PARTS, BLOCK)
        if SHARDS > 1:
            put(total, i, inside, boxes, call, rank, SHARDS, CAPACITY)
            put(moment, pairs + i, inside, boxes, call, rank, SHARDS, CAPACITY)
        else:
            total, moment = _keep_gradients(total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT)
            first += total
            second += moment
    if SHARDS > 1:
        tl.debug_barrier()
        for step in range(steps):
            i, inside = _find_pairs(step, groups, members, ACROSS, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            moment = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(SHARDS):
                total += get(i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                moment += get(pairs + i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            # PairBlocks without a pair have heard nothing, which is NaN.
            total = tl.where(inside, total, 0.0)
            moment = tl.where(inside, moment, 0.0)
            total, moment = _keep_gradients(total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT)
            first += total
            second += moment
        count(calls, call)
    _store_backward(first, second, mean, rstd, out, voxels, groups, members, steps, pairs, ACROSS, GIVEN, BLOCK)


def _compute_moments_of_parts(slab: Tensor) -> tuple[Tensor, Tensor, int]:
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
    means, squares, per_program = _compute_moments_of_parts(slab)
    parts, batch, channels = means.shape
    pairs = batch * channels
    out = slab.new_empty((2, batch, channels), dtype=torch.float32)
    with select_device(slab):
        _join_kernel[(triton.cdiv(pairs, LANES),)](
            means, squares, out, pairs, parts, count_voxels(slab), per_program, **JOIN
        )  # fmt: skip
    return out


def exchange_coefficients(
    slab: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    running: Running | None = None,
) -> Tensor:
    """Compute ``choice.exchange_coefficients``.

    Parameters
    ----------
    slab, shares, weight, bias, eps, mailbox, grouping, running
        See ``choice.exchange_coefficients``.
    """
    slab = make_even(slab, slab)
    means, squares, per_program = _compute_moments_of_parts(slab)
    means, squares = (part.to(shares.device, non_blocking=True) for part in (means, squares))
    parts, batch, channels = means.shape
    lanes = grouping.find_lanes(batch, channels)
    out = means.new_empty((5, batch, channels))
    if running is None:
        kept: tuple[Any, ...] = None, None, 0.0, 0.0
    else:
        count = lanes.members * count_voxels(slab)
        kept = running.mean, running.variance, running.momentum, running.momentum / (count - 1)
    with select_device(means):
        _exchange_coefficients_kernel[(lanes.blocks,)](
            means, squares, shares, _make_dense(weight), _make_dense(bias), out, *kept, eps, channels,
            lanes.groups, lanes.members, lanes.steps, batch * channels, parts, count_voxels(slab), per_program,
            **_describe_peers(mailbox), WEIGHT=weight is not None, BIAS=bias is not None, RUNNING=running is not None,
            **_describe_lanes(lanes),
        )  # fmt: skip
    if running is not None:
        increment_version((running.mean, running.variance))
    return out


def exchange_backward_coefficients(
    partials: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    given: bool = False,
) -> Tensor:
    """Compute ``choice.exchange_backward_coefficients`` from the sums of ``passes.gradient_sums``.

    Parameters
    ----------
    partials
        Of ``passes.gradient_sums``.
    mean, rstd, weight, voxels, given
        See ``reference.backward_coefficients``.
    mailbox, grouping
        See ``choice.exchange_coefficients``.
    """
    parts, rows, batch, channels = partials.shape
    lanes = grouping.find_lanes(batch, channels)
    out = partials.new_empty((4, batch, channels))
    with select_device(partials):
        _exchange_backward_kernel[(lanes.blocks,)](
            partials, mean, rstd, _make_dense(weight), out, float(voxels), channels,
            lanes.groups, lanes.members, lanes.steps, batch * channels, parts, rows,
            **_describe_peers(mailbox), WEIGHT=weight is not None, GIVEN=given, **_describe_lanes(lanes),
        )  # fmt: skip
    return out


def given_coefficients(
    slab: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute ``reference.given_coefficients``.

    Parameters
    ----------
    slab, mean, variance, weight, bias, eps
        See ``reference.given_coefficients``.
    """
    batch, channels = slab.shape[:2]
    pairs = batch * channels
    out = mean.new_empty((5, batch, channels), dtype=torch.float32)
    with select_device(mean):
        _given_kernel[(triton.cdiv(pairs, 128),)](
            mean.contiguous(), variance.contiguous(), _make_dense(weight), _make_dense(bias), out, eps, channels, pairs,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def _describe_lanes(lanes: PairBlocks) -> dict[str, Any]:
    """Return what a kernel is compiled for."""
    return {"ACROSS": lanes.across, "PARTS": TILE // lanes.block, "BLOCK": lanes.block, "num_warps": 4}


def _make_dense(values: Tensor | None) -> Tensor | None:
    """Return weights or biases as the kernels read them: one behind the other, which those of a style may not be."""
    return None if values is None else values.contiguous()


def _describe_peers(mailbox: ValueMailbox | None) -> dict[str, Any]:
    """Return what a kernel is told of the other processes."""
    if mailbox is None:
        return {"boxes": None, "calls": None, "rank": 0, "patience": 0, "SHARDS": 1, "CAPACITY": CAPACITY}
    return mailbox.describe()


def coefficients(stacked: Tensor, shares: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute ``reference.coefficients``.

    Parameters
    ----------
    stacked, shares, weight, bias, eps
        See ``reference.coefficients``.
    """
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((5, batch, channels))
    with select_device(stacked):
        _coefficients_kernel[(triton.cdiv(pairs, 128),)](
            stacked, shares, _make_dense(weight), _make_dense(bias), out, eps, channels, pairs, shards,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def backward_coefficients(stacked: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, voxels: int) -> Tensor:
    """Compute ``reference.backward_coefficients``.

    Parameters
    ----------
    stacked, mean, rstd, weight, voxels
        See ``reference.backward_coefficients``.
    """
    shards, _, batch, channels = stacked.shape
    pairs = batch * channels
    out = stacked.new_empty((4, batch, channels))
    with select_device(stacked):
        _backward_kernel[(triton.cdiv(pairs, 128),)](
            stacked, mean, rstd, _make_dense(weight), out, float(voxels), channels, pairs, shards,
            WEIGHT=weight is not None, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out
