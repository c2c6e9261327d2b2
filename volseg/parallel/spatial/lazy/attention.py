"""Compute the product of attention weights and values, with all steps that lead to the weights, in one kernel.

``scores`` has the steps, which wait, and ``device.attention`` has the kernels. A step that the kernel included still
waits: a reader gets the values that torch computes, and the gradient bypasses the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from volseg.device import attention
from volseg.device.attention import Addend
from volseg.device.first_order import first_order
from volseg.parallel.spatial.lazy.scores import take_up, waits
from volseg.parallel.spatial.lazy.waiting_scores import (
    AddendPlace,
    WaitingScores,
    find_cut,
    is_cut_once,
    list_shapes,
)
from volseg.parallel.spatial.pending import PLAIN, Written
from volseg.parallel.spatial.sources import Moment, Unchanged
from volseg.parallel.spatial.volume import ShardedVolume, give_whole


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
