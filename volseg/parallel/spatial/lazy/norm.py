"""Norms that wait for the activation behind them: statistics now, one pass over memory for both later.

Instance, batch and group norm share one form: statistics of (sample, channel) pairs, averaged over groups of pairs,
then one scale and one shift per pair. One autograd function does all three with the activation, and needs two small
collectives (statistics forward, two sums backward). It keeps the norm's input and nothing else of that size. A sum may
include one norm, or two (see ``addition``): ``activation(norm + second)`` is the same function with one more term.

The statistics are computed when the norm is called; scale and shift wait (see ``pending``).
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, copy_into, layout_of
from volseg.device.norm import choice
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.lazy.recipes import Copy, WaitingRecipe, narrow_planes
from volseg.parallel.spatial.lazy.statistics import Affine, NormPlan, NormStatistics, Pooled
from volseg.parallel.spatial.plan.shards import Span, spans
from volseg.parallel.spatial.sources import Moment, Recipe, Unchanged, Write, split_rows
from volseg.parallel.spatial.transport.pieces import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume


def settle_in_checkpoint(volume: ShardedVolume) -> ShardedVolume:
    """Return a norm's result, written if the network's own code checkpoints here, and waiting otherwise.

    A waiting norm at the end of a checkpointed block would be computed after the block. The recomputation stops at the
    last tensor saved in the block: earlier than torch's, and without an update of the buffers that torch's updates.
    """
    waiting = volume.pending
    if isinstance(waiting, WaitingNorm) and waiting.moment.hooks not in (None, volume.context.hooks):
        volume.settle()
    return volume


Terms = tuple[Term, Term | None]
"""Terms of a slab: a norm, and the term that is added to it, if any."""


@dataclass(frozen=True, slots=True)
class Add:
    """Writes a norm, or the sum of a norm and another term, and the activation of the sum.

    The tensors are, for each norm, its input, scale, shift, and PReLU's slope if any; then those of ``write``.

    Attributes
    ----------
    norms
        Activation of each norm, and whether it has a slope.
    dtype
        Element type of the result.
    write, kept_in
        Writes the second term if this is not a norm, in this element type.
    activation
        Activation of the sum.
    planes
        Number of planes to write at a time; None for all.
    """

    norms: tuple[tuple[Activation, bool], ...]
    dtype: torch.dtype
    write: Write | None = None
    kept_in: torch.dtype | None = None
    activation: Activation = IDENTITY
    planes: int | None = None

    @property
    def passes_gradient_on(self) -> bool:
        """Whether the second term gets the gradient of the sum unchanged."""
        return len(self.norms) == 1 and self.activation == IDENTITY

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write planes of the sum."""
        if self.planes is None:
            choice.add(*self.read(tensors, start, out.shape[DIM]), self.activation, out)
            return
        for begin, end in self.cut(out.shape[DIM]):
            tile = choice.add(*self.read(tensors, start + begin, end - begin), self.activation)
            copy_into(tile, out.narrow(DIM, begin, end - begin))
            del tile  # before the next tile is written

    def cut(self, planes: int) -> list[Span]:
        """Return the spans of planes to write at a time."""
        if self.planes is None:
            return [(0, planes)]
        return spans(planes, -(-planes // self.planes)) if planes else []

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Return the tensors of each norm, and those of the other term."""
        *own, rest = split_rows(tensors, [*(3 + has_slope for _, has_slope in self.norms), len(tensors)])
        return own, rest

    def read(
        self, tensors: Sequence[Tensor], start: int, count: int, means: Sequence[Tensor | None] = (None, None)
    ) -> Terms:
        """Return planes of both terms.

        Parameters
        ----------
        tensors
            See above.
        start, count
            The planes.
        means
            Mean of each norm, for the backward pass.
        """
        norms, rest = self.split(tensors)
        terms: list[Term | None] = [
            Term(narrow_planes(slab, start, count), mean, scale, shift, activation, *slope)
            for (slab, scale, shift, *slope), mean, (activation, _) in zip(norms, means, self.norms, strict=False)
        ]
        if isinstance(self.write, Copy):
            terms.append(Term(narrow_planes(rest[0], start, count)))
        elif self.write is not None:
            like = norms[0][0]
            shape = [*like.shape[:DIM], count, *like.shape[DIM + 1 :]]
            other = torch.empty(shape, dtype=self.kept_in, device=like.device, memory_format=layout_of(like))
            self.write(rest, other, start)
            terms.append(Term(other))
        first, second = [*terms, None][:2]
        assert first is not None
        return first, second


class WaitingTerms(WaitingRecipe):
    """One norm, or the sum of a norm and another term, and an activation of the sum, if any.

    Attributes
    ----------
    context
        Context of the network.
    norms
        One norm or two.
    columns
        The slabs of each norm, then those of each volume that is joined in another term.
    write_terms
        Function of the recipe.
    moment
        Modes in which the slabs are written.
    """

    context: Context
    norms: "Sequence[WaitingNorm]"
    columns: Sequence[Sequence[Tensor]]
    write_terms: Add
    moment: Moment

    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:  # type: ignore[override]
        """Return the slabs that ``fill`` computes, with the history of all terms."""
        parameters = chain.from_iterable((norm.weight, norm.bias) for norm in self.norms)
        slopes = chain.from_iterable(norm.slopes for norm in self.norms)
        with self.moment.restored():
            return list(_Add.apply(self, fill, *parameters, *slopes, *chain.from_iterable(self.columns)))


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
        self.stand_ins = self.likes = slabs = list(slabs)
        self.columns = [slabs]
        self.activation = IDENTITY
        self.slopes: list[Tensor] = []
        self.write_terms = Add(((IDENTITY, False),), slabs[0].dtype)
        spread = self.context.spread
        self.recipe = Recipe(tuple(zip(slabs, spread(found.scale), spread(found.shift), strict=True)), self.write_terms)
        self.moment = Moment([tensor for tensor in (weight, bias) if tensor is not None])
        # A backward pass reads the weight.
        read = slabs if weight is None or not self.moment.grad_enabled else [*slabs, weight]
        self.unchanged = Unchanged(read)
        communicator = self.context.communicator
        cut_along_depth = volume.dims == (DIM,) and volume.ndim == 5 and communicator.num_shards > 1
        self.keeps_recipe = communicator.is_direct
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
        taken.activation, rows = activation, self.recipe.rows
        if slope is not None:
            taken.moment, taken.unchanged = self.moment.including(slope), self.unchanged.including(slope)
            taken.slopes = self.context.spread(slope)
            rows = tuple((*row, own.detach()) for row, own in zip(rows, taken.slopes, strict=True))
        taken.write_terms = replace(self.write_terms, norms=((activation, slope is not None),))
        taken.recipe = Recipe(rows, taken.write_terms)
        return taken


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
    """Takes weight and bias of each norm, a slope per slab of each norm that has one, then the slabs of all columns."""

    @staticmethod
    def forward(
        ctx: Any, waiting: WaitingTerms, fill: Callable[[], list[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        norms, rows, write = waiting.norms, waiting.recipe.rows, waiting.write_terms
        ctx.context, ctx.room = waiting.context, waiting.room
        ctx.plans = [NormPlan.of(norm) for norm in norms]
        others = waiting.columns[len(norms) :]
        needed = [
            any(ctx.needs_input_grad[first:][: len(rows)]) for first in range(-len(rows) * len(others), 0, len(rows))
        ]
        # Channels, type, and whether a gradient is needed, of each volume that is joined in a term that is not a norm.
        ctx.columns = [(own[0].shape[1], own[0].dtype, asked) for own, asked in zip(others, needed, strict=True)]
        if write.passes_gradient_on:
            # Without an activation such a term is not kept: torch does not keep it either.
            write, rows = replace(write, write=None), tuple(write.split(row)[0][0] for row in rows)
        ctx.write, ctx.sizes = write, [len(row) for row in rows]
        known = chain.from_iterable((norm.found.mean, norm.found.rstd) for norm in norms)
        ctx.save_for_backward(*known, *tensors[: 2 * len(norms) : 2], *chain.from_iterable(rows))
        return tuple(fill())

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, plans, spread = iter(ctx.saved_tensors), ctx.plans, ctx.context.spread
        known = [tuple(islice(saved, 2)) for _ in plans]
        weights = list(islice(saved, len(plans)))
        rows = split_rows([*saved], ctx.sizes)
        means = list(zip(*(spread(mean) for mean, _ in known), strict=True))
        each: list[_Slab] = list(zip(gradients, rows, means, strict=True))
        sums = [_add_sums(ctx.write, *own) for own in each]
        norms = list(zip(*(ctx.write.split(row)[0] for row in rows), strict=True))
        factors, of_parameters, of_slopes = [], [], []
        for place, (plan, weight, (mean, rstd)) in enumerate(zip(plans, weights, known, strict=True)):
            own = [of_slab[place] for of_slab in sums]
            pairs, *found = plan.combine(own, mean, rstd, weight, [slab for slab, *_ in norms[place]])
            factors.append(pairs)
            of_parameters += found
            if plan.has_slope:
                of_slopes += [sum_to_slope(part, slope) for part, (*_, slope) in zip(own, norms[place], strict=True)]
        differentiate = _differentiate if ctx.write.planes is None else _differentiate_in_tiles
        inputs = [differentiate(ctx, own, pairs) for own, *pairs in zip(each, *factors, strict=True)]
        columns = list(zip(*inputs, strict=True))
        for column, plan, (mean, _), pairs in zip(columns, plans, known, factors, strict=False):
            plan.note_vanishing(mean, column, pairs)
        return None, None, *of_parameters, *of_slopes, *chain.from_iterable(columns)


def _add_sums(write: Add, gradient: Tensor, row: Sequence[Tensor], means: Sequence[Tensor]) -> list[Tensor]:
    """Return ``choice.add_sums`` of a slab, over all tiles."""
    found = []
    for start, stop in write.cut(gradient.shape[DIM]):
        own = narrow_planes(gradient, start, stop - start).to(write.dtype)
        found.append(choice.add_sums(own, *write.read(row, start, stop - start, means), write.activation))
    return found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]


_Slab = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
"""Gradient of a slab of the result, the tensors that it was written from, and the mean of each norm."""

Factors = list[tuple[Tensor, Tensor]]
"""Factor and offset of each norm of a slab (see ``reference.gradient_input``)."""


def _differentiate(ctx: Any, slab: _Slab, factors: Factors) -> Sequence[Tensor | None]:
    """Return the gradients of a slab of each term."""
    gradient, row, means = slab
    first, second = ctx.write.read(row, 0, gradient.shape[DIM], means)
    both = len(ctx.plans) == 2 or any(asked for *_, asked in ctx.columns)
    room = _give_room(ctx, first, second)
    found = choice.add_gradients(gradient, first, second, factors, ctx.write.activation, room, both=both)
    return found[: len(ctx.plans) + len(ctx.columns)]


def _differentiate_in_tiles(ctx: Any, slab: _Slab, factors: Factors) -> Sequence[Tensor | None]:
    """Return the gradients of a slab of the norm's input, and of each volume that is joined in the other term."""
    write: Add = ctx.write
    gradient, row, means = slab
    given = row[0]
    outs: list[Tensor | None] = [torch.empty_like(given)]
    for channels, dtype, asked in ctx.columns:
        shape = [given.shape[0], channels, *given.shape[DIM:]]
        layout = layout_of(given)
        outs.append(torch.empty(shape, dtype=dtype, device=given.device, memory_format=layout) if asked else None)
    widths = [channels for channels, *_ in ctx.columns]
    both = any(asked for *_, asked in ctx.columns)
    for start, stop in write.cut(given.shape[DIM]):
        own = gradient.narrow(DIM, start, stop - start).to(write.dtype)
        terms = write.read(row, start, stop - start, means)
        first, second = choice.add_gradients(own, *terms, factors, write.activation, both=both)
        parts = [first, *([None] * len(widths) if second is None else second.split(widths, 1))]
        for out, part in zip(outs, parts, strict=True):
            if out is not None and part is not None:
                copy_into(part, out.narrow(DIM, start, stop - start))
        del own, terms, first, second, parts, part  # before the next tile is written
    return outs


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


def sum_to_slope(sums: Tensor, slope: Tensor) -> Tensor:
    """Return PReLU's gradient from the sums of a slab's parts, ``(parts, 3, B, C)``."""
    third = sums[:, 2]
    total = third.sum() if slope.numel() == 1 else third.flatten(0, -2).sum(0)
    return total.to(slope.dtype).reshape(slope.shape)
