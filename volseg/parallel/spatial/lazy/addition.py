"""A sum that takes the norms in front of it along, and an activation behind it: residual blocks.

``act(norm(x) + y)`` and ``act(norm(x) + norm(y))`` are one pass over memory forward and two backward, as a norm alone.
What is added to a norm that waits need not be written in between, nor its gradient.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from volseg.device import fusions
from volseg.device.first_order import first_order
from volseg.device.layout import DIM
from volseg.device.norm import addition
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.norm.term import Term
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.lazy.norm import WaitingNorm, sum_to_slope
from volseg.parallel.spatial.lazy.repeated import WaitingRepeat
from volseg.parallel.spatial.lazy.statistics import Pooled, combine_sums
from volseg.parallel.spatial.lazy.vanishing import note_vanishing
from volseg.parallel.spatial.pending import PLAIN, Waiting
from volseg.parallel.spatial.recipe import Recipe, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait, find_needed_room, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, defer

__all__ = ["add_in_place", "add_waiting"]


class WaitingSum(Waiting):
    """A norm, perhaps with its activation, plus another one or slabs as they are, and perhaps an activation.

    Parameters
    ----------
    context
        Of the network.
    norm
        The first.
    other
        The second.
    """

    def __init__(self, context: Context, norm: WaitingNorm, other: WaitingNorm | list[Tensor]) -> None:
        self.context, self.norm, self.other = context, norm, other
        self.activation = IDENTITY
        second = other.stand_ins if isinstance(other, WaitingNorm) else other
        dtypes = norm.stand_ins[0].dtype, second[0].dtype
        is_mixed = dtypes[0] != dtypes[1]
        self.stand_ins = list(norm.stand_ins)
        if is_mixed:
            dtype = torch.promote_types(*dtypes)
            self.stand_ins = [outline_slab(slab.shape, dtype, slab.device) for slab in norm.stand_ins]
        # Several samples with room around each lie apart, which whoever reads no halo would copy. Sums of two types are
        # cast by the convolution behind, which leaves the room itself.
        self.room = 0 if is_mixed or len(norm.stand_ins[0]) > 1 else norm.room
        if isinstance(other, WaitingNorm):
            self.moment, self.unchanged = norm.moment.joined(other.moment), norm.unchanged.joined(other.unchanged)
        else:
            self.moment, self.unchanged = norm.moment, norm.unchanged.joined(Unchanged(other))

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "WaitingSum | None":
        """Return this with an activation behind; None where there is one already, or it has a slope or another history.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.activation != IDENTITY or slope is not None or not self.moment.is_now():
            return None
        taken = WaitingSum.__new__(WaitingSum)
        vars(taken).update(vars(self), activation=activation)
        return taken

    def end_block(self, volume: ShardedVolume) -> None:
        """Write it: two slabs would be kept for one."""
        self.settle(volume)

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write norm, sum and activation one after another: behind an activation ``write`` keeps what is added."""
        if self.activation == IDENTITY or isinstance(self.other, WaitingNorm):
            self.settle(volume)
            return
        self.check()
        normed, _, _ = self.norm.write(())
        with self.moment.restored():
            rows = zip(normed, self.other, strict=True)
            volume._slabs = [self.activation.apply(first + second) for first, second in rows]
        volume.pending = PLAIN

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Add up."""
        norms = [norm for norm in (self.norm, self.other) if isinstance(norm, WaitingNorm)]
        wait: Wait | None = None

        def fill(rows: Sequence[tuple[Term, Term]]) -> list[Tensor]:
            nonlocal wait
            outs, wait = self._fill(rows, halos)
            return outs

        spread = self.context.spread
        second = self.other.stand_ins if isinstance(self.other, WaitingNorm) else self.other
        parameters = chain.from_iterable((norm.weight, norm.bias) for norm in norms)
        with self.moment.restored():
            slopes = [[] if norm.slope is None else spread(norm.slope) for norm in norms]
            slopes_of_all = chain.from_iterable(slopes)
            slabs = _Add.apply(self, fill, norms, *parameters, *slopes_of_all, *self.norm.stand_ins, *second)
        return list(slabs), None, wait

    def _fill(self, rows: Sequence[tuple[Term, Term]], halos: Sequence[Halo]) -> tuple[list[Tensor], Wait | None]:
        """Return the slabs, with room where convolutions take a halo, and the wait for the halos."""
        room = find_needed_room(self.room, halos)
        if not room:
            return [addition.add(*row, self.activation) for row in rows], None
        outs = [allocate_with_room(first.slab, room) for first, _ in rows]

        def planes(number: int, start: int, count: int) -> None:
            first, second = (term._replace(slab=term.slab.narrow(DIM, start, count)) for term in rows[number])
            addition.add(first, second, self.activation, outs[number].narrow(DIM, start, count))

        return outs, write_outer_first(outs, room, halos, planes)


def add_waiting(first: Any, second: Any) -> ShardedVolume | None:
    """Return the sum, which takes along a norm that waits; None where none does, or the two are not alike.

    Parameters
    ----------
    first, second
        What is added.
    """
    waiting = _find_sum(first, second) or _find_sum(second, first)
    if waiting is None:
        return None
    for volume in (first, second):
        volume.is_bypassed = volume.is_bypassed or isinstance(volume.pending, WaitingNorm)
    return defer(waiting, first.dims, first.shape, first.context)


def add_in_place(first: Any, second: Any) -> bool:
    """Add to a norm that waits, and which nobody has seen; say whether that was done.

    Parameters
    ----------
    first
        The one that is changed.
    second
        What is added.
    """
    waiting = None
    are_volumes = isinstance(first, ShardedVolume) and isinstance(second, ShardedVolume)
    # A sum of two types might have another one than what is changed.
    if are_volumes and first.dtype == second.dtype and first.hooks is None and first.origin is None:
        waiting = _find_sum(first, second)
    if waiting is None:
        return False
    first.pending = waiting
    increment_version(first)
    first.context.defer(first)
    second.is_bypassed = second.is_bypassed or isinstance(second.pending, WaitingNorm)
    return True


def _find_sum(first: Any, second: Any) -> WaitingSum | None:
    """Return the sum of a norm that waits and another volume, if they are alike."""
    if not isinstance(first, ShardedVolume) or not isinstance(second, ShardedVolume) or not fusions.is_on("sums"):
        return None
    norm = first.pending
    if not isinstance(norm, WaitingNorm) or first is second or first.context is not second.context:
        return None
    alike = first.shape == second.shape and first.dims == second.dims and _adds_up(first.dtype, second.dtype)
    if not alike or first.merged is not None or second.merged is not None or second.origin is not None:
        return None
    other = second.pending if isinstance(second.pending, WaitingNorm) else None
    if not all(waiting.moment.is_now() for waiting in (norm, other) if waiting is not None):
        return None
    return WaitingSum(first.context, norm, _read_slabs(second) if other is None else other)


def _read_slabs(volume: ShardedVolume) -> list[Tensor]:
    """Return a volume's slabs; those of an image that is repeated in the memory of one channel."""
    expanded = volume.pending.expand() if isinstance(volume.pending, WaitingRepeat) else None
    return volume.slabs if expanded is None else expanded


def _adds_up(first: torch.dtype, second: torch.dtype) -> bool:
    """Say whether a norm and what is added are of one type, or of two whose sum is float32, as the kernels count."""
    return first == second or {first, second} <= {torch.float16, torch.bfloat16, torch.float32}


class _Add(torch.autograd.Function):
    """Gets weight and bias of each norm, then a slope for each slab of each that has one, then the slabs of both."""

    @staticmethod
    def forward(
        ctx: Any,
        waiting: WaitingSum,
        fill: Callable[[Sequence[tuple[Term, Term]]], list[Tensor]],
        norms: Sequence[WaitingNorm],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.context, ctx.activation, ctx.room = waiting.context, waiting.activation, waiting.room
        ctx.plans = [_Plan(norm) for norm in norms]
        ctx.count = len(waiting.stand_ins)
        ctx.is_pair = len(norms) == 2
        known = [value for norm in norms for value in (norm.found.mean, norm.found.rstd)]
        affine = [value for norm in norms for value in (norm.found.scale, norm.found.shift)]
        rows = _list_terms(ctx, known, affine, tensors)
        ctx.wants_both = ctx.is_pair or any(ctx.needs_input_grad[-ctx.count :])
        # What is added as it is, with nothing behind the sum, has the sum's gradient: torch does not keep it either.
        ctx.keeps_both = ctx.is_pair or waiting.activation != IDENTITY
        ctx.save_for_backward(*known, *affine, *(tensors if ctx.keeps_both else tensors[: -ctx.count]))
        return tuple(fill(rows))

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, 2 * len(ctx.plans)
        known, affine, tensors = saved[:count], saved[count : 2 * count], saved[2 * count :]
        if not ctx.keeps_both:
            tensors = *tensors, *gradients  # in the place of what nobody reads
        rows = _list_terms(ctx, known, affine, tensors)
        sums = [addition.add_sums(g, *row, ctx.activation) for g, row in zip(gradients, rows, strict=True)]
        slabs = tensors[-2 * ctx.count : -ctx.count]
        factors, of_parameters, of_slopes = [], [], []
        for number, plan in enumerate(ctx.plans):
            own = [of_slab[number] for of_slab in sums]
            weight, bias = tensors[2 * number : 2 * number + 2]
            mean, rstd = known[2 * number : 2 * number + 2]
            found = combine_sums(ctx.context, plan.pooled, own, mean, rstd, weight, plan.voxels, slabs)
            factors.append(list(zip(*map(ctx.context.spread, found[:2]), strict=True)))
            of_parameters.append(None if weight is None else found.weight.to(weight))
            of_parameters.append(None if bias is None else found.bias.to(bias))
            slopes = [row[number].slope for row in rows]
            of_slopes += [sum_to_slope(each, s) for each, s in zip(own, slopes, strict=True) if s is not None]
        inputs = []
        for gradient, (first, second), *pairs in zip(gradients, rows, *factors, strict=True):
            room, both = _give_room(ctx, first, second), ctx.wants_both
            of_slabs = addition.add_gradients(gradient, first, second, pairs, ctx.activation, room, both=both)
            inputs.append(of_slabs)
        columns = list(zip(*inputs, strict=True))
        for column, plan, pairs in zip(columns, ctx.plans, factors, strict=False):
            if plan.pooled.ignores_channels(*known[0].shape):
                for gradient, (_, offset) in zip(column, pairs, strict=True):
                    note_vanishing(gradient, offset)
        return None, None, None, *of_parameters, *of_slopes, *chain.from_iterable(columns)


def _give_room(ctx: Any, *terms: Term) -> list[Tensor | None]:
    """Return memory for the gradients of norms: the convolution in front wants neighbours' planes around it."""
    return [allocate_with_room(term.slab, ctx.room) if ctx.room and term.is_norm else None for term in terms]


class _Plan:
    """What a norm's backward pass needs besides tensors."""

    def __init__(self, norm: WaitingNorm) -> None:
        self.pooled: Pooled = norm.pooled
        self.voxels, self.activation, self.has_slope = norm.found.voxels, norm.activation, norm.slope is not None


def _list_terms(
    ctx: Any, known: Sequence[Tensor], affine: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[tuple[Term, Term]]:
    """Return both terms of each slab."""
    spread, count = ctx.context.spread, ctx.count
    slabs, others = tensors[-2 * count : -count], tensors[-count:]
    columns, place = [], 2 * len(ctx.plans)
    for number, plan in enumerate(ctx.plans):
        slopes: list[Tensor | None] = [None] * count
        if plan.has_slope:
            slopes, place = list(tensors[place : place + count]), place + count
        of_norm = zip(
            slabs if number == 0 else others,
            spread(known[2 * number]),
            *map(spread, affine[2 * number : 2 * number + 2]),
            slopes,
            strict=True,
        )
        columns.append(
            [Term(x, mean, scale, shift, plan.activation, slope) for x, mean, scale, shift, slope in of_norm]
        )
    if not ctx.is_pair:
        columns.append([Term(slab) for slab in others])
    return list(zip(*columns, strict=True))
