"""Norms that wait for the activation behind them: statistics now, one pass over memory for both later.

Instance, batch and group norm share one form: statistics of (sample, channel) pairs, averaged over groups of pairs,
then one scale and one shift per pair. One autograd function does all three with the activation, and needs two small
collectives (statistics forward, two sums backward). It keeps the norm's input and nothing else of that size. A sum may
include one norm, or two (see ``addition``): ``activation(norm + second)`` is the same function with one more term.

The statistics are computed when the norm is called; scale and shift wait (see ``pending``).
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, layout_of
from volseg.device.norm import choice
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.lazy.recipes import Normalize
from volseg.parallel.spatial.lazy.statistics import Affine, NormPlan, NormStatistics, Pooled
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.sources import Moment, Outline, Recipe, Unchanged, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait, compute_halo_room, write_outer_first
from volseg.parallel.spatial.transport.pieces import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume

Terms = tuple[Term, Term | None]
"""Terms of a slab: a norm, and the term that is added to it, if any."""


def settle_in_checkpoint(volume: ShardedVolume) -> ShardedVolume:
    """Return a norm's result, written if the network's own code checkpoints here, and waiting otherwise.

    A waiting norm at the end of a checkpointed block would be computed after the block. The recomputation stops at the
    last tensor saved in the block: earlier than torch's, and without an update of the buffers that torch's updates.
    """
    waiting = volume.pending
    if isinstance(waiting, WaitingNorm) and waiting.moment.hooks not in (None, volume.context.hooks):
        volume.settle()
    return volume


class WaitingTerms(Waiting):
    """One norm, or the sum of a norm and another term, and an activation of the sum, if any.

    Attributes
    ----------
    context
        Context of the network.
    norms
        One norm or two.
    columns
        The slabs of each term.
    outer
        Activation of the sum.
    moment
        Modes in which the slabs are written.
    """

    context: Context
    norms: "Sequence[WaitingNorm]"
    columns: Sequence[Sequence[Tensor]]
    outer: Activation = IDENTITY
    moment: Moment

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Apply norms and activations, and add the terms."""
        wait: Wait | None = None
        written: Sequence[Terms] = ()

        def fill(rows: Sequence[Terms]) -> list[Tensor]:
            nonlocal wait, written
            written, (outs, wait) = rows, self._fill(rows, halos)
            return outs

        slabs = self.run(fill)
        return slabs, self.describe(written), wait

    def describe(self, rows: Sequence[Terms]) -> Recipe | None:
        """Return the recipe of the slabs; None for a sum, which keeps its terms."""
        del rows
        return None

    def run(self, fill: Callable[[Sequence[Terms]], list[Tensor]]) -> list[Tensor]:
        """Return the slabs that ``fill`` computes from the terms, with their history."""
        with self.moment.restored():
            slopes = [[] if norm.slope is None else self.context.spread(norm.slope) for norm in self.norms]
            parameters = chain.from_iterable((norm.weight, norm.bias) for norm in self.norms)
            return list(_Add.apply(self, fill, *parameters, *chain.from_iterable((*slopes, *self.columns))))

    def _fill(self, rows: Sequence[Terms], halos: Sequence[Halo]) -> tuple[list[Tensor], Wait | None]:
        """Return the slabs, with room where convolutions receive a halo, and the wait for the halos."""
        room = compute_halo_room(self.room, halos)
        if not room:
            return [choice.add(*row, self.outer) for row in rows], None
        outs = [allocate_with_room(first.slab, room) for first, _ in rows]

        def planes(number: int, start: int, count: int) -> None:
            first, second = (
                None if term is None else term._replace(slab=term.slab.narrow(DIM, start, count))
                for term in rows[number]
            )
            assert first is not None
            choice.add(first, second, self.outer, outs[number].narrow(DIM, start, count))

        return outs, write_outer_first(outs, room, halos, planes)


class WaitingNorm(WaitingTerms):
    """A norm, with its activation if any, that waits for the next operator.

    Parameters
    ----------
    volume, slabs
        The norm's input, which ``found`` describes.
    pooled
        Which (sample, channel) pairs share statistics.
    found
        The statistics.
    affine
        Weight, bias and eps of the norm.
    """

    def __init__(
        self, volume: ShardedVolume, slabs: Sequence[Tensor], pooled: Pooled, found: NormStatistics, affine: Affine
    ) -> None:
        weight, bias, _ = affine
        self.context, self.pooled, self.found, self.weight, self.bias = volume.context, pooled, found, weight, bias
        self.stand_ins = slabs = list(slabs)
        self.columns = [slabs]
        self.activation = IDENTITY
        self.slope: Tensor | None = None
        self.moment = Moment([tensor for tensor in (weight, bias) if tensor is not None])
        # A backward pass reads the weight.
        read = slabs if weight is None or not self.moment.grad_enabled else [*slabs, weight]
        self.unchanged = Unchanged(read)
        communicator = self.context.communicator
        cut_along_depth = volume.dims == (DIM,) and volume.ndim == 5 and communicator.num_shards > 1
        self.room = self.context.room if cut_along_depth and communicator.is_direct else 0

    @property
    def norms(self) -> "Sequence[WaitingNorm]":  # type: ignore[override]
        """The norm itself, as the only one."""
        return [self]

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "WaitingNorm | None":
        """Return the norm with an activation, or None if it has one already, or the modes have changed.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.activation != IDENTITY or not self.moment.is_now():
            return None
        taken = copy(self)
        taken.activation, taken.slope = activation, slope
        if slope is not None:
            taken.moment, taken.unchanged = self.moment.including(slope), self.unchanged.including(slope)
        return taken

    def outline(self) -> Outline | None:
        """Return the slabs without memory, for the backward pass; None if the communicator is not direct."""
        if not self.context.communicator.is_direct:
            return None
        terms: Sequence[Terms] = ()

        def fill(rows: Sequence[Terms]) -> list[Tensor]:
            nonlocal terms
            terms = rows
            return [outline_slab(slab.shape, slab.dtype, slab.device) for slab in self.stand_ins]

        slabs, recipe = self.run(fill), self.describe(terms)
        return None if recipe is None else (slabs, recipe, layout_of(self.stand_ins[0]))

    def describe(self, rows: Sequence[Terms]) -> Recipe | None:
        """Return the recipe that writes the slabs from the norm's input."""
        if not self.context.communicator.is_direct:
            return None
        kept = [
            (slab, term.scale, term.shift, *(() if term.slope is None else (term.slope.detach(),)))
            for slab, (term, _) in zip(self.stand_ins, rows, strict=True)
        ]
        return Recipe(tuple(kept), Normalize(self.activation))  # type: ignore[arg-type]


def find_norm(first: Any, second: Any) -> WaitingNorm | None:
    """Return the first volume's waiting norm if a sum with the second, of the same cut, can include it; else None."""
    if not isinstance(first, ShardedVolume) or not isinstance(second, ShardedVolume) or not fusions.is_on("sums"):
        return None
    norm, alike = first.pending, first.context is second.context and first is not second
    if not isinstance(norm, WaitingNorm) or not alike or first.shape != second.shape or first.dims != second.dims:
        return None
    plain = first.merged is None and second.merged is None and second.origin is None
    return norm if plain and norm.moment.is_now() else None


class _Add(torch.autograd.Function):
    """Takes weight and bias of each norm, a slope per slab of each norm that has one, then the slabs of all terms."""

    @staticmethod
    def forward(
        ctx: Any, waiting: WaitingTerms, fill: Callable[[Sequence[Terms]], list[Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        norms = waiting.norms
        ctx.context, ctx.activation, ctx.room = waiting.context, waiting.outer, waiting.room
        ctx.plans = [NormPlan.of(norm) for norm in norms]
        ctx.count, ctx.num_columns = len(waiting.columns[0]), len(waiting.columns)
        ctx.wants_both = len(norms) == 2 or (ctx.num_columns == 2 and any(ctx.needs_input_grad[-ctx.count :]))
        # Without an activation a plain term has the sum's gradient, and is not kept: torch does not keep it either.
        ctx.keeps_all = ctx.num_columns == len(norms) or waiting.outer != IDENTITY
        known = [(norm.found.mean, norm.found.rstd, norm.found.scale, norm.found.shift) for norm in norms]
        rest = tensors[2 * len(norms) :]
        weights, kept = tensors[: 2 * len(norms) : 2], rest if ctx.keeps_all else rest[: -ctx.count]
        ctx.save_for_backward(*chain.from_iterable(known), *weights, *kept)
        return tuple(fill(_list_terms(ctx, known, rest)))

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, number = iter(ctx.saved_tensors), len(ctx.plans)
        known = [tuple(islice(saved, 4)) for _ in ctx.plans]
        weights, rest = list(islice(saved, number)), [*saved]
        if not ctx.keeps_all:
            rest += gradients  # in place of tensors that are not used
        rows = _list_terms(ctx, known, rest)
        pairs_of_terms = zip(gradients, rows, strict=True)
        sums = [choice.add_sums(own, first, second, ctx.activation) for own, (first, second) in pairs_of_terms]
        slabs = [first.slab for first, _ in rows]
        factors, of_parameters, of_slopes = [], [], []
        for place, (plan, weight, (mean, rstd, _, _)) in enumerate(zip(ctx.plans, weights, known, strict=True)):
            own = [of_slab[place] for of_slab in sums]
            pairs, *found = plan.combine(own, mean, rstd, weight, slabs)
            factors.append(pairs)
            of_parameters += found
            if plan.has_slope:
                of_slopes += [sum_to_slope(each, row[place].slope) for each, row in zip(own, rows, strict=True)]
        inputs = []
        for gradient, (first, second), *pairs in zip(gradients, rows, *factors, strict=True):
            room, both = _give_room(ctx, first, second), ctx.wants_both
            of_slabs = choice.add_gradients(gradient, first, second, pairs, ctx.activation, room, both=both)
            inputs.append(of_slabs[: ctx.num_columns])
        columns = list(zip(*inputs, strict=True))
        for column, plan, (mean, *_), pairs in zip(columns, ctx.plans, known, factors, strict=False):
            plan.note_vanishing(mean, column, pairs)
        return None, None, *of_parameters, *of_slopes, *chain.from_iterable(columns)


def _give_room(ctx: Any, *terms: Term | None) -> list[Tensor | None]:
    """Return memory for the gradients of norms: the convolution in front needs neighbours' planes around them.

    Several samples get no room: the volume would not be contiguous, and that convolution would copy it.
    """
    return [
        allocate_with_room(term.slab, ctx.room)
        if ctx.room and term is not None and term.is_norm and len(term.slab) == 1
        else None
        for term in terms
    ]


def _list_terms(ctx: Any, known: Sequence[tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> list[Any]:
    """Return the terms of each slab (see ``Terms``), from the slopes and the slabs."""
    spread, rest = ctx.context.spread, iter(tensors)
    nothing = [None] * ctx.count
    slopes = [list(islice(rest, ctx.count)) if plan.has_slope else nothing for plan in ctx.plans]
    columns: list[Any] = []
    for plan, (mean, _, scale, shift), own in zip(ctx.plans, known, slopes, strict=True):
        of_norm = zip(islice(rest, ctx.count), spread(mean), spread(scale), spread(shift), own, strict=True)
        columns.append([Term(x, m, a, s, plan.activation, slope) for x, m, a, s, slope in of_norm])
    if len(columns) == 1:
        columns.append([Term(slab) for slab in rest] or nothing)
    return list(zip(*columns, strict=True))


def sum_to_slope(sums: Tensor, slope: Tensor) -> Tensor:
    """Return PReLU's gradient from the sums of a slab's parts, ``(parts, 3, B, C)``."""
    third = sums[:, 2]
    total = third.sum() if slope.numel() == 1 else third.flatten(0, -2).sum(0)
    return total.to(slope.dtype).reshape(slope.shape)
