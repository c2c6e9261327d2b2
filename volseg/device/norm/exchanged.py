# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Coefficients of the norms in Triton, by kernels that join a slab's statistics and exchange them with other shards."""

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device.norm.gathered import keep_gradients, make_dense, store_backward, store_coefficients
from volseg.device.norm.grouping import ALONE, TILE, Grouping, PairBlocks, find_pairs, find_slots
from volseg.device.norm.running import Running
from volseg.device.norm.statistics import compute_moments_of_parts, join_parts
from volseg.device.peer.values import CAPACITY, ValueMailbox, count, get, put
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_voxels, make_even, select_device

__all__ = ["exchange_backward_coefficients", "exchange_coefficients"]


@triton.jit
def _sum_parts(partials, i, inside, pairs, parts, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first two sums of the pairs ``i`` over all parts of the slab, each of which has ``rows`` of them."""
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    moment = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part[:, None] < parts) & inside[None, :]
        place = partials + part[:, None] * rows * pairs + i[None, :]
        total += tl.load(place, mask=there, other=0.0)
        moment += tl.load(place + pairs, mask=there, other=0.0)
    return tl.sum(total, 0), tl.sum(moment, 0)


@kernel(do_not_specialize=["rank", "patience", "parts", "V", "per_program"])  # counts, which change no instruction
def _exchange_coefficients_kernel(
    means, squares, shares, weight, bias, out, running_mean, running_var, momentum, bessel, eps,
    C, groups, members, steps, pairs, parts, V, per_program, boxes, calls, rank, patience,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr, SHARDS: tl.constexpr, CAPACITY: tl.constexpr,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mean, variance = join_parts(
        means, squares, groups, members, steps, pairs, parts, V, per_program, ACROSS, PARTS, BLOCK
    )
    slot, speaks, listens = find_slots(groups, ACROSS, BLOCK)
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
        i, inside = find_pairs(step, groups, members, ACROSS, BLOCK)
        store_coefficients(mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)
    if RUNNING:
        old = tl.load(running_mean + slot, mask=speaks, other=0.0)
        tl.store(running_mean + slot, old + momentum * (mean - old), mask=speaks)
        old = tl.load(running_var + slot, mask=speaks, other=0.0)
        tl.store(running_var + slot, old + momentum * (variance - old) + bessel * variance, mask=speaks)


@kernel(do_not_specialize=["rank", "patience", "parts"])
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
        i, inside = find_pairs(step, groups, members, ACROSS, BLOCK)
        total, moment = _sum_parts(partials, i, inside, pairs, parts, rows, PARTS, BLOCK)
        if SHARDS > 1:
            put(total, i, inside, boxes, call, rank, SHARDS, CAPACITY)
            put(moment, pairs + i, inside, boxes, call, rank, SHARDS, CAPACITY)
        else:
            total, moment = keep_gradients(total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT)
            first += total
            second += moment
    if SHARDS > 1:
        tl.debug_barrier()
        for step in range(steps):
            i, inside = find_pairs(step, groups, members, ACROSS, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            moment = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(SHARDS):
                total += get(i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                moment += get(pairs + i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            # PairBlocks without a pair have heard nothing, which is NaN.
            total = tl.where(inside, total, 0.0)
            moment = tl.where(inside, moment, 0.0)
            total, moment = keep_gradients(total, moment, rstd, weight, out, i, inside, C, pairs, WEIGHT)
            first += total
            second += moment
        count(calls, call)
    store_backward(first, second, mean, rstd, out, voxels, groups, members, steps, pairs, ACROSS, GIVEN, BLOCK)


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
    """Return ``reference.coefficients`` of a slab and those of the others, exchanged by the kernel that uses them.

    Parameters
    ----------
    slab
        One that Triton ``takes``.
    shares, weight, bias, eps
        See ``reference.coefficients``; where the kernel runs.
    mailbox
        How the kernel exchanges; None where there is one slab.
    grouping
        Which pairs of sample and channel share their statistics.
    running
        What the kernel moves towards them, where there is one slab: elsewhere it may run more than once.
    """
    assert running is None or mailbox is None
    slab = make_even(slab, slab)
    means, squares, per_program = compute_moments_of_parts(slab)
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
            means, squares, shares, make_dense(weight), make_dense(bias), out, *kept, eps, channels,
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
    """Return ``reference.backward_coefficients`` likewise.

    Parameters
    ----------
    partials
        Sums of each part of the slab: see ``passes.gradient_sums``.
    mean, rstd
        Of the slab; the second where the kernel runs.
    weight, voxels, given
        See ``reference.backward_coefficients``.
    mailbox, grouping
        See ``exchange_coefficients``.
    """
    partials, mean = (value.to(rstd.device, non_blocking=True) for value in (partials, mean))
    parts, rows, batch, channels = partials.shape
    lanes = grouping.find_lanes(batch, channels)
    out = partials.new_empty((4, batch, channels))
    with select_device(partials):
        _exchange_backward_kernel[(lanes.blocks,)](
            partials, mean, rstd, make_dense(weight), out, float(voxels), channels,
            lanes.groups, lanes.members, lanes.steps, batch * channels, parts, rows,
            **_describe_peers(mailbox), WEIGHT=weight is not None, GIVEN=given, **_describe_lanes(lanes),
        )  # fmt: skip
    return out


def _describe_lanes(lanes: PairBlocks) -> dict[str, Any]:
    """Return what a kernel is compiled for."""
    return {"ACROSS": lanes.across, "PARTS": TILE // lanes.block, "BLOCK": lanes.block, "num_warps": 4}


def _describe_peers(mailbox: ValueMailbox | None) -> dict[str, Any]:
    """Return what a kernel is told of the other processes."""
    if mailbox is None:
        return {"boxes": None, "calls": None, "rank": 0, "patience": 0, "SHARDS": 1, "CAPACITY": CAPACITY}
    return mailbox.describe()
