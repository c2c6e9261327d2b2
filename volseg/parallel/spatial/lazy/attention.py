"""A waiting step of attention, and the product of attention weights and values, with all steps, in one kernel.

Each shard computes its own part of attention. ``scores`` makes the steps, which wait, and ``device.attention`` has the
kernels. A step that the kernel included still waits: a reader gets the values that torch computes, and the gradient
bypasses the step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.device import attention
from volseg.device.attention import Addend
from volseg.device.first_order import first_order
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import active_autocast_dtype
from volseg.parallel.spatial.pending import PLAIN, Waiting, Written
from volseg.parallel.spatial.plan.shards import Merged
from volseg.parallel.spatial.sources import Moment, Unchanged
from volseg.parallel.spatial.transport.halo import Halo
from volseg.parallel.spatial.volume import ShardedVolume, give_whole


def is_cut_once(volume: Any) -> bool:
    """Return whether a value is a volume with one cut dim, and not merged if on a single shard."""
    if not isinstance(volume, ShardedVolume) or len(volume.dims) != 1:
        return False
    return volume.context.communicator.num_shards > 1 or volume.merged is None


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a product, and whether its second factor is gathered."""

    dim: int
    merged: Merged | None
    gathers: bool = False


def find_cut(first: ShardedVolume, second: ShardedVolume, along: int, summed: int) -> Cut | None:
    """Return the cut of a product of two volumes by slabs of the first; None if slabs cannot compute the product.

    Parameters
    ----------
    first
        A volume ``(..., N, K)``.
    second
        A volume with the same dims in front of the last two.
    along, summed
        Dim of ``second`` that each row of ``first`` meets whole, and the dim that the product sums over.
    """
    (dim,), rows = first.dims, first.ndim - 2
    if first.context.communicator.num_shards == 1:  # the dim only tells where a cut would be
        if dim != first.ndim - 1:
            return Cut(dim, None)
        if second.dims[0] == summed:
            return None
        return Cut(second.dims[0] if second.dims[0] < rows else first.ndim - 1, None)
    if dim < rows:
        return Cut(dim, first.merged) if (second.dims, second.merged) == (first.dims, first.merged) else None
    if dim > rows or second.dims != (along,) or (second.merged is not None and second.merged.outer > 1):
        return None
    return Cut(dim, first.merged, gathers=True)


def list_shapes(volume: ShardedVolume, *, gathered: bool = False) -> list[tuple[int, ...]]:
    """Return the shape of every shard's slab, or of the whole with ``gathered``; it is the same in all processes."""
    (dim,), (extents,) = volume.dims, volume.extents()
    if gathered or len(extents) == 1:
        return [tuple(volume.shape)] * len(extents)
    return [(*volume.shape[:dim], extent, *volume.shape[dim + 1 :]) for extent in extents]


Compute = Callable[[Sequence[Tensor]], list[Tensor]]
"""Computes a step from the slabs of the previous step."""


@dataclass(frozen=True, slots=True)
class AddendPlace:
    """The matrices of scores that a term is added to (see ``device.attention``), and the shape of a term's matrix."""

    every: int
    count: int
    sides: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Steps:
    """Inputs and settings from which a volume of scores or weights is computed.

    Attributes
    ----------
    queries
        ``(..., N, F)`` of each slab.
    keys
        ``(..., M, F)`` for each slab: its own, or all if the tokens are cut.
    sizes, cut
        Sizes of the whole product in front of its last two dims, and its cut.
    factor
        Factor of the product.
    terms, places
        Added tensors in the network's shape, and their places: for each term, one per slab.
    is_softened
        Whether a softmax over the last dim was taken.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    cut: Cut
    factor: float = 1.0
    terms: tuple[tuple[Tensor, ...], ...] = ()
    places: tuple[tuple[AddendPlace, ...], ...] = ()
    is_softened: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether the scores are only a product times a factor."""
        return not self.terms and not self.is_softened


class WaitingScores(Waiting):
    """A step of attention.

    Parameters
    ----------
    steps
        All steps so far.
    before
        Volume of the previous step; None for the product.
    compute
        Computes this step from the previous step; the product is computed from the queries.
    stand_ins
        Stand-ins for the slabs.
    unchanged
        Tensors that all steps read.

    Attributes
    ----------
    is_taken
        Whether a product with values was computed together with it.
    written
        The written slabs, if any: an in-place change of them changes the input of later steps.
    """

    refusal = (
        "the queries, the keys, a bias or a mask of attention were changed in place before its scores were used; do "
        "that out of place, or use the scores before"
    )

    def __init__(
        self,
        steps: Steps,
        before: ShardedVolume | None,
        compute: Compute,
        stand_ins: list[Tensor],
        unchanged: Unchanged,
    ) -> None:
        self.steps, self.before, self.compute = steps, before, compute
        self.stand_ins, self.unchanged = list(stand_ins), unchanged
        self.earlier = None if before is None else before.pending
        self.moment = Moment([term for term in chain(*steps.terms) if term.is_leaf])
        self.autocast = active_autocast_dtype(self.stand_ins[0])
        self.is_taken = False
        self.written: Unchanged | None = None

    def check(self) -> None:
        """Refuse to write from changed tensors, including scores that were read and changed in the meantime."""
        super().check()
        step = self.earlier
        while isinstance(step, WaitingScores):
            if step.written is not None and not step.written.holds():
                raise UnsupportedOperatorError(
                    "scores of attention were changed in place after a softmax or a sum had read them, and what that "
                    "returned is read only now: do that out of place, or read it before"
                )
            step = step.earlier

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> None:
        """Compute this step and the steps before it with torch, and note the slabs' versions."""
        del halos
        self.check()
        given = self.steps.queries if self.before is None else self.before.slabs
        with self.moment.restored(), self._autocast_again():
            volume._slabs, volume.pending = self.compute(given), PLAIN
        self.written = Unchanged(volume._slabs)

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Write, unless a product included the step: it is rarely read again, and invalid reads are refused."""
        if not self.is_taken:
            self.settle(volume)

    def is_now(self) -> bool:
        """Return whether the modes, and the terms that are trained, are the same now."""
        modes = self.moment.is_now() and self.autocast == active_autocast_dtype(self.stand_ins[0])
        return modes and self.moment.trains_alike()

    def _autocast_again(self) -> AbstractContextManager[Any]:
        device = self.stand_ins[0].device.type
        if self.autocast == active_autocast_dtype(self.stand_ins[0]):
            return nullcontext()
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None)


def waits(volume: Any) -> bool:
    """Return whether a value is a waiting step of attention."""
    return isinstance(volume, ShardedVolume) and isinstance(volume.pending, WaitingScores)


def take_up(volume: ShardedVolume) -> WaitingScores | None:
    """Return a step that another can follow; None if the modes have changed, or a previous step was written."""
    waiting = volume.pending
    if not isinstance(waiting, WaitingScores) or not waiting.is_now():
        return None
    step = waiting.before
    while step is not None:
        if not isinstance(step.pending, WaitingScores):
            return None
        step = step.pending.before
    return waiting


def attend(weights: Any, values: Any) -> ShardedVolume | None:
    """Return the product of waiting weights and values, or None if it must be computed like any other product.

    Parameters
    ----------
    weights
        ``(..., N, M)``.
    values
        ``(..., M, G)``.
    """
    if not waits(weights) or not is_cut_once(values):
        return None
    given = values.slabs  # first: if the values are made of the steps, this writes the steps
    waiting = take_up(weights)
    if waiting is None or not waiting.steps.is_softened:
        return None
    steps, context, tokens = waiting.steps, weights.context, values.ndim - 2
    alone = context.communicator.num_shards == 1  # the dim of a cut does not matter then
    cut_alike = alone or (weights.dims, weights.merged) == ((steps.cut.dim,), steps.cut.merged)
    # The weights must have the shape and the cut of the product of queries and keys.
    if values.context is not context or not cut_alike or weights.shape[:-2] != steps.sizes:
        return None
    if values.dtype != steps.keys[0].dtype or (waiting.autocast is None and weights.dtype != values.dtype):
        return None
    cut = find_cut(weights, values, tokens, tokens)
    if cut is None or values.shape[:-1] != (*steps.sizes, weights.shape[-1]):
        return None
    features, last = steps.keys[0].shape[-1], values.shape[-1]
    for *outer, rows, columns in list_shapes(weights):
        if not attention.fits((*outer, rows, features), (*outer, columns, features), (*outer, columns, last)):
            return None
    waiting.check()
    given = give_whole(values) if cut.gathers else given
    places, terms = ([*zip(*columns, strict=True)] or [()] * len(given) for columns in (steps.places, steps.terms))
    results = []
    for *row, own_places, own_terms in zip(steps.queries, steps.keys, given, places, terms, strict=True):
        lines = [tensor if tensor.ndim == 4 else tensor.unsqueeze(1) for tensor in row]
        result = _Attend.apply(*lines, steps.factor, own_places, *own_terms)
        results.append(result if row[0].ndim == 4 else result.squeeze(1))
    step: ShardedVolume | None = weights
    while step is not None:
        own = step.pending
        assert isinstance(own, WaitingScores)
        own.is_taken = True
        step.is_bypassed = step.is_bypassed or torch.is_grad_enabled()
        step = own.before
    attended = ShardedVolume(results, (cut.dim,), (*weights.shape[:-1], values.shape[-1]), context, cut.merged)
    if any(result.requires_grad for result in results):
        attended.pending = KeptResult(None, Unchanged(()))
        context.defer(attended)
    return attended


@dataclass(slots=True, eq=False)
class KeptResult(Written):
    """Result of attention that the backward pass reads; torch's backward pass does not, and allows in-place changes.

    So an in-place operator changes a copy, unless other code has read the slabs and may hold a view of them.
    """

    moment: Moment = field(default_factory=Moment)

    def settle_apart(self, volume: ShardedVolume) -> None:
        """Copy the slabs, and leave the originals to autograd."""
        with self.moment.restored():
            volume._slabs = [slab.clone() for slab in volume._slabs]
        volume.pending = PLAIN


Places = tuple[AddendPlace, ...]
"""The place of each term."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, factor: float, places: Places, *terms: Tensor
    ) -> Tensor:
        out, logs = attention.attend(query, key, value, _place(terms, places, query, key), factor)
        ctx.factor, ctx.places = factor, places
        ctx.save_for_backward(query, key, value, out, logs, *terms)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, logs, *terms = ctx.saved_tensors
        wanted = ctx.needs_input_grad[5:]
        given = _place(terms, ctx.places, query, key)
        *found, slopes = attention.differentiate(gradient, query, key, value, out, logs, given, ctx.factor, wanted)
        rows = zip(slopes, terms, ctx.places, strict=True)
        return *found, None, None, *(None if own is None else _gather(own, *rest) for own, *rest in rows)


def _place(terms: Sequence[Tensor], places: Sequence[AddendPlace], query: Tensor, key: Tensor) -> list[Addend]:
    """Return the terms in the form that the kernels take."""
    sides = query.shape[-2], key.shape[-2]
    return [
        Addend(term.detach().reshape(own.count, *own.sides).expand(own.count, *sides), own.every, own.count)
        for term, own in zip(terms, places, strict=True)
    ]


def _gather(slope: Tensor, term: Tensor, place: AddendPlace) -> Tensor:
    """Return the gradient of a network's term from the gradient of its matrices."""
    for dim, size in zip((-2, -1), place.sides, strict=True):
        if size == 1:
            slope = slope.sum(dim, keepdim=True)
    return slope.reshape(term.shape).to(term.dtype)
