# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Coefficients of the norms in Triton, by kernels that join a slab's statistics and exchange them with other shards.

With replicas that share a batch, the senders are all slabs of all replicas, one replica after the other. The number of
voxels of each slab travels with its statistics, since the replicas may have different numbers of rows. The gradients of
weight and bias are those of this replica: they are summed over the replicas with all other gradients.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device.norm.gathered import keep_gradients, make_dense, store_backward, store_coefficients, weigh_sums
from volseg.device.norm.grouping import (
    ALONE,
    THREADS,
    TILE,
    Grouping,
    PairBlocks,
    compute_pairs,
    compute_samples,
    compute_slots,
)
from volseg.device.norm.reference import Running
from volseg.device.norm.statistics import compute_moments_of_parts, join_parts
from volseg.device.peer.values import CAPACITY, ValueMailbox, count, get, put
from volseg.device.triton_kernels import kernel, tl, triton
from volseg.device.triton_tiles import count_voxels, make_even


class ExchangedCoefficients(NamedTuple):
    """Values that a norm computes from its input."""

    found: Tensor
    """Result of ``reference.coefficients``, ``(5, B, C)``."""
    number: Tensor | None = None
    """Voxels of a channel over the samples of all replicas, ``(1,)``; None without other replicas."""


class ExchangedGradients(NamedTuple):
    """Values that a norm's backward pass computes from the sums of all shards."""

    factor: Tensor
    """See ``reference.gradient_input``, ``(B, C)``."""
    offset: Tensor
    """See ``factor``."""
    weight: Tensor
    """Gradient of the weight over all samples of this replica, ``(C,)``."""
    bias: Tensor
    """Gradient of the bias over all samples of this replica, ``(C,)``."""


def count_values(grouping: Grouping, batch: int, channels: int, over_replicas: bool = False) -> int:
    """Return the largest number of values that a shard sends: equal for any rows of the replicas."""
    if over_replicas:
        return 3 * channels
    return 2 * channels * (1 if grouping.over_batch else batch)


@triton.jit
def _sum_parts(partials, i, inside, pairs, parts, rows, samples, pitch, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first two sums of the pairs ``i`` over all parts of the slab, each of which has ``rows`` of them.

    The sum also covers so many samples, at distances of ``pitch``.
    """
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    moment = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts * samples, PARTS):
        row = first + tl.arange(0, PARTS)
        there = (row[:, None] < parts * samples) & inside[None, :]
        part = row // samples
        place = partials + (part * rows * pairs + (row - part * samples) * pitch)[:, None] + i[None, :]
        total += tl.load(place, mask=there, other=0.0)
        moment += tl.load(place + pairs, mask=there, other=0.0)
    return tl.sum(total, 0), tl.sum(moment, 0)


@kernel(do_not_specialize=["rank", "patience", "parts", "V", "per_program"])  # counts, which change no instruction
def _exchange_coefficients_kernel(
    means, squares, shares, weight, bias, out, running_mean, running_var, momentum, bessel, eps, number,
    C, groups, members, steps, pairs, parts, V, per_program, boxes, calls, rank, patience,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr, REPLICAS: tl.constexpr, SHARDS: tl.constexpr,
    CAPACITY: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    mean, variance = join_parts(
        means, squares, groups, members, steps, pairs, parts, V, per_program, ACROSS, PARTS, BLOCK
    )
    slot, speaks, listens = compute_slots(groups, ACROSS, BLOCK)
    if SHARDS > 1:
        call = (tl.load(calls) + 1).to(tl.int64)
        put(mean, slot, speaks, boxes, call, rank, SHARDS, CAPACITY)
        put(variance, groups + slot, speaks, boxes, call, rank, SHARDS, CAPACITY)
        total = tl.zeros((BLOCK,), tl.float32)
        if REPLICAS > 1:
            put(total + V * 1.0 * members, 2 * groups + slot, speaks, boxes, call, rank, SHARDS, CAPACITY)
        tl.debug_barrier()  # send everything before waiting
        if REPLICAS > 1:
            for peer in tl.static_range(SHARDS):
                total += get(2 * groups + slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            tl.store(number + 0 * slot, total, mask=slot == 0)
            bessel = momentum / (total - 1.0)
        mean = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SHARDS):
            if REPLICAS > 1:
                share = get(2 * groups + slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY) / total
            else:
                share = tl.load(shares + peer)
            mean += share * get(slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
        variance = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SHARDS):
            if REPLICAS > 1:
                share = get(2 * groups + slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY) / total
            else:
                share = tl.load(shares + peer)
            delta = get(slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY) - mean
            own = get(groups + slot, listens, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            variance += share * (own + delta * delta)
        count(calls, call)
    if ACROSS:
        for step in range(steps):
            i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
            store_coefficients(mean, variance, weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS)
    else:
        for sample in range(0, members, ROWS):
            i, inside = compute_samples(sample, groups, members, ROWS, BLOCK)
            store_coefficients(
                mean[None, :], variance[None, :], weight, bias, out, eps, i, inside, C, pairs, WEIGHT, BIAS
            )  # fmt: skip
    if RUNNING:
        old = tl.load(running_mean + slot, mask=speaks, other=0.0)
        tl.store(running_mean + slot, old + momentum * (mean - old), mask=speaks)
        old = tl.load(running_var + slot, mask=speaks, other=0.0)
        tl.store(running_var + slot, old + momentum * (variance - old) + bessel * variance, mask=speaks)


@kernel(do_not_specialize=["rank", "patience", "parts"])
def _exchange_backward_kernel(
    partials, mean, rstd, weight, out, kept, number, C, groups, members, steps, pairs, parts, rows,
    boxes, calls, rank, patience, WEIGHT: tl.constexpr, REPLICAS: tl.constexpr, SHARDS: tl.constexpr,
    CAPACITY: tl.constexpr, ACROSS: tl.constexpr, GIVEN: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    call = tl.full((), 0, tl.int64)
    if SHARDS > 1:
        call = (tl.load(calls) + 1).to(tl.int64)
    if ACROSS:  # channels of a group have a weight each
        for step in range(steps):
            i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
            total, moment = _sum_parts(partials, i, inside, pairs, parts, rows, 1, 0, PARTS, BLOCK)
            if SHARDS > 1:
                put(total, i, inside, boxes, call, rank, SHARDS, CAPACITY)
                put(moment, pairs + i, inside, boxes, call, rank, SHARDS, CAPACITY)
            else:
                keep_gradients(total, moment, rstd, kept, i, inside, pairs)
                total, moment = weigh_sums(total, moment, rstd, weight, i, inside, C, WEIGHT)
                first += total
                second += moment
        if SHARDS > 1:
            tl.debug_barrier()
            for step in range(steps):
                i, inside = compute_pairs(step, groups, members, ACROSS, BLOCK)
                total = tl.zeros((BLOCK,), tl.float32)
                moment = tl.zeros((BLOCK,), tl.float32)
                for peer in tl.static_range(SHARDS):
                    total += get(i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                    moment += get(pairs + i, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                # PairBlocks without a pair have received NaN.
                total = tl.where(inside, total, 0.0)
                moment = tl.where(inside, moment, 0.0)
                keep_gradients(total, moment, rstd, kept, i, inside, pairs)
                total, moment = weigh_sums(total, moment, rstd, weight, i, inside, C, WEIGHT)
                first += total
                second += moment
            count(calls, call)
    else:  # the samples of a channel have one weight, and one deviation
        slot, inside, _ = compute_slots(groups, ACROSS, BLOCK)
        first, second = _sum_parts(partials, slot, inside, pairs, parts, rows, members, groups, PARTS, BLOCK)
        own_first, own_second = first, second
        if SHARDS > 1:
            put(first, slot, inside, boxes, call, rank, SHARDS, CAPACITY)
            put(second, groups + slot, inside, boxes, call, rank, SHARDS, CAPACITY)
            tl.debug_barrier()
            first = tl.zeros((BLOCK,), tl.float32)
            second = tl.zeros((BLOCK,), tl.float32)
            own_first = tl.zeros((BLOCK,), tl.float32)
            own_second = tl.zeros((BLOCK,), tl.float32)
            slabs: tl.constexpr = SHARDS // REPLICAS
            for peer in tl.static_range(SHARDS):
                total = get(slot, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                moment = get(groups + slot, inside, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
                first += total
                second += moment
                if REPLICAS > 1:
                    is_own = rank // slabs == peer // slabs
                    own_first += tl.where(is_own, total, 0.0)
                    own_second += tl.where(is_own, moment, 0.0)
            if REPLICAS == 1:
                own_first, own_second = first, second
            count(calls, call)
        keep_gradients(own_first, own_second, rstd, kept, slot, inside, groups)
        first, second = weigh_sums(first, second, rstd, weight, slot, inside, C, WEIGHT)
    voxels = tl.load(number) if REPLICAS > 1 else number
    store_backward(first, second, mean, rstd, out, voxels, groups, members, steps, pairs, ACROSS, GIVEN, ROWS, BLOCK)


def exchange_coefficients(
    slab: Tensor,
    shares: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    running: Running | None = None,
    voxels: int | None = None,
    replicas: int = 1,
) -> ExchangedCoefficients:
    """Return ``reference.coefficients`` of a slab and of the others, exchanged by the kernel that uses them.

    Parameters
    ----------
    slab
        A slab that Triton ``takes``.
    shares, weight, bias, eps
        See ``reference.coefficients``; on the kernel's device. With replicas there are no shares.
    mailbox
        Mailbox of the kernel's exchange; None for a single slab.
    grouping
        Groups of pairs of sample and channel that share statistics.
    running
        Running statistics, which the kernel moves if it receives all other values.
    voxels
        Voxels of a channel in a sample, over all shards; by default those of the slab.
    replicas
        Number of replicas that share the batch; with several, statistics are over the batch.
    """
    assert replicas == 1 or (mailbox is not None and grouping.over_batch)
    home = slab.device if mailbox is None else mailbox.calls.device
    slab = make_even(slab, slab)
    means, squares, per_program = compute_moments_of_parts(slab)
    means, squares = (part.to(home, non_blocking=True) for part in (means, squares))
    parts, batch, channels = means.shape
    lanes = grouping.compute_lanes(batch, channels)
    out = means.new_empty((5, batch, channels))
    number = means.new_empty(1) if replicas > 1 else None
    moves = running is not None and (mailbox is None or mailbox.hears)
    kept: tuple[Any, ...] = None, None, 0.0, 0.0
    if running is not None and moves:
        count = lanes.members * (count_voxels(slab) if voxels is None else voxels)
        bessel = running.momentum / (count - 1) if replicas == 1 else 0.0  # with replicas the kernel computes the count
        kept = running.mean, running.variance, running.momentum, bessel
    _exchange_coefficients_kernel[(lanes.blocks,)](
        means, squares, shares, make_dense(weight), make_dense(bias), out, *kept, eps, number, channels,
        lanes.groups, lanes.members, lanes.steps, batch * channels, parts, count_voxels(slab), per_program,
        **_describe_peers(mailbox), WEIGHT=weight is not None, BIAS=bias is not None, RUNNING=moves,
        REPLICAS=replicas, **_describe_lanes(lanes),
    )  # fmt: skip
    if running is not None and moves:
        increment_version((running.mean, running.variance))
    return ExchangedCoefficients(out, number)


def exchange_backward_coefficients(
    partials: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int | Tensor,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    given: bool = False,
    replicas: int = 1,
) -> ExchangedGradients:
    """Compute ``reference.backward_coefficients`` in the same way, with its gradients summed over the samples.

    Parameters
    ----------
    partials
        Sums of each part of the slab: see ``passes.gradient_sums``.
    mean, rstd
        Statistics of the slab; ``rstd`` is on the kernel's device.
    weight, voxels, given
        See ``reference.backward_coefficients``; with replicas, the voxels are ``ExchangedCoefficients.number``.
    mailbox, grouping, replicas
        See ``exchange_coefficients``.
    """
    partials, mean = (value.to(rstd.device, non_blocking=True) for value in (partials, mean))
    parts, rows, batch, channels = partials.shape
    lanes = grouping.compute_lanes(batch, channels)
    out = partials.new_empty((2, batch, channels))
    kept = partials.new_empty((2, batch if lanes.across or lanes.members == 1 else 1, channels))
    number = voxels if isinstance(voxels, Tensor) else float(voxels * lanes.members)
    _exchange_backward_kernel[(lanes.blocks,)](
        partials, mean, rstd, make_dense(weight), out, kept, number, channels,
        lanes.groups, lanes.members, lanes.steps, batch * channels, parts, rows,
        **_describe_peers(mailbox), WEIGHT=weight is not None, REPLICAS=replicas, GIVEN=given,
        **_describe_lanes(lanes),
    )  # fmt: skip
    of_weight, of_bias = kept[:, 0] if kept.shape[1] == 1 else kept.sum(1)  # one launch less
    return ExchangedGradients(out[0], out[1], of_weight, of_bias)


def _describe_lanes(lanes: PairBlocks) -> dict[str, Any]:
    """Return the constants for which a kernel is compiled."""
    sizes = {"PARTS": TILE // lanes.block, "ROWS": lanes.rows, "BLOCK": lanes.block}
    return {"ACROSS": lanes.across, **sizes, "num_warps": THREADS // 32}


def _describe_peers(mailbox: ValueMailbox | None) -> dict[str, Any]:
    """Return the kernel's arguments that describe the other processes."""
    if mailbox is None:
        return {"boxes": None, "calls": None, "rank": 0, "patience": 0, "SHARDS": 1, "CAPACITY": CAPACITY}
    return mailbox.describe()
