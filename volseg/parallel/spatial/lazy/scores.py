"""Attention scores that a network computes step by step: they wait until their reader is known.

``q @ k.mT``, a factor, biases and masks, a ``view`` that splits samples, ``softmax`` and a cast are steps, each a
waiting volume. A product with values includes all of them (see ``attention``). Any other reader of a step gets the
values that torch computes from the previous step.

Each shard has its own scores: of its windows or samples if these are cut, or of its own queries with all keys, which
are gathered, if the tokens are cut.

Whether a step waits depends only on sizes, types and modes, and on previous steps in the same modes: a recomputed block
may get steps that were written in the meantime, and must decide as in its first run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device import attention, fusions
from volseg.device.torch_internals import PLAIN_TENSORS
from volseg.parallel.spatial.context import active_autocast_dtype
from volseg.parallel.spatial.lazy.attention import (
    AddendPlace,
    Compute,
    Steps,
    WaitingScores,
    find_cut,
    is_cut_once,
    list_shapes,
    take_up,
)
from volseg.parallel.spatial.sources import Unchanged, outline_slab
from volseg.parallel.spatial.volume import ShardedVolume, defer, give_whole

Reshaped = Callable[[ShardedVolume], Any]

MOST_TERMS = 2
"""Number of terms that the kernels take."""

TERMS = (*PLAIN_TENSORS, nn.Parameter, ShardedVolume)

WIDTHS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def score(compute: Callable[[Tensor, Tensor], Tensor], query: Any, key: Any, *, turned: bool) -> ShardedVolume | None:
    """Return the waiting scores of queries and keys; None for any other product.

    Parameters
    ----------
    compute
        Computes the product of two slabs.
    query
        ``(..., N, F)``.
    key
        ``(..., F, M)``; with ``turned`` ``(..., M, F)``.
    turned
        Whether the key is ``(..., M, F)``.
    """
    if not is_cut_once(query) or not is_cut_once(key) or query.context is not key.context:
        return None
    if query.ndim not in (3, 4) or query.shape[:-2] != key.shape[:-2] or query.dtype != key.dtype:
        return None
    if not fusions.is_on("attention"):
        return None
    inner, tokens = (key.ndim - 1, key.ndim - 2) if turned else (key.ndim - 2, key.ndim - 1)
    cut = find_cut(query, key, tokens, inner)
    if cut is None:
        return None
    queries, given = query.slabs, key.slabs
    if not all(map(_has_kernel, queries)) or any(slab.is_inference() for slab in (*queries, *given)):
        return None  # torch does not count their in-place changes
    shapes = [(*size[:-1], key.shape[tokens]) for size in list_shapes(query)]
    lines = [(*size[:-2], size[tokens], size[inner]) for size in list_shapes(key, gathered=cut.gathers)]
    if query.shape[-1] != key.shape[inner] or not all(map(attention.fits, list_shapes(query), lines)):
        return None
    if active_autocast_dtype(queries[0]) not in (None, query.dtype):
        return None
    gathered = give_whole(key) if cut.gathers else given

    def compute_all(slabs: Sequence[Tensor]) -> list[Tensor]:
        return list(map(compute, slabs, gathered))

    own = [shapes[number] for number in query.context.communicator.indices]
    stand_ins = [outline_slab(size, slab.dtype, slab.device) for size, slab in zip(own, queries, strict=True)]
    shape = (*query.shape[:-1], key.shape[tokens])
    keys = tuple(own if turned else own.transpose(-2, -1) for own in gathered)
    steps = Steps(tuple(queries), keys, tuple(shape[:-2]), cut)
    waiting = WaitingScores(steps, None, compute_all, stand_ins, Unchanged((*queries, *given)))
    return defer(waiting, (cut.dim,), shape, query.context, cut.merged)


def scale(func: Callable, volume: ShardedVolume, factor: Any, *, divides: bool) -> ShardedVolume | None:
    """Return waiting scores multiplied or divided by a number; None if a term was added before.

    Parameters
    ----------
    func
        Multiplies or divides a slab by the number.
    volume, factor
        The waiting scores, and the number.
    divides
        Whether ``func`` divides.
    """
    waiting = take_up(volume)
    if waiting is None or not waiting.steps.is_bare or type(factor) not in (int, float) or (divides and factor == 0):
        return None
    found = waiting.steps.factor / factor if divides else waiting.steps.factor * factor
    steps = replace(waiting.steps, factor=found)
    return _go_on(volume, waiting, steps, lambda slabs: [func(slab, factor) for slab in slabs], volume.dtype)


def add_term(
    func: Callable, volume: ShardedVolume, term: Any, given: Callable[[Tensor, ShardedVolume], list[Tensor]]
) -> ShardedVolume | None:
    """Return waiting scores plus a tensor; None if the kernels cannot add this tensor.

    Parameters
    ----------
    func
        Adds the term to a slab.
    volume, term
        The waiting scores, and the tensor.
    given
        Returns the part of a tensor for each slab of a volume.
    """
    waiting = take_up(volume)
    if waiting is None or type(term) not in TERMS or term.dtype not in WIDTHS or term.ndim == 0:
        return None
    if _find_place(volume.shape, term.shape) is None:
        return None
    if waiting.steps.is_softened or len(waiting.steps.terms) == MOST_TERMS:
        return None
    if term.device != volume.device or term.is_inference():
        return None
    if isinstance(term, ShardedVolume) and (term.requires_grad or term.context is not volume.context):
        return None
    alone = volume.context.communicator.num_shards == 1 and not isinstance(term, ShardedVolume)
    own = tuple(volume.context.spread(term) if alone else given(term, volume))
    places = [_find_place(slab.shape, part.shape) for slab, part in zip(volume._slabs, own, strict=True)]
    found = tuple(place for place in places if place is not None)
    assert len(found) == len(own)  # a slab's matrices of scores are cut as the term is
    steps = replace(waiting.steps, terms=(*waiting.steps.terms, own), places=(*waiting.steps.places, found))
    dtype = torch.promote_types(volume.dtype, term.dtype)
    return _go_on(volume, waiting, steps, lambda slabs: list(map(func, slabs, own)), dtype, *own)


def _find_place(shape: Sequence[int], term: Sequence[int]) -> AddendPlace | None:
    """Return the matrices that a term is added to; None if they are not regularly spaced, or the sum is larger."""
    if len(term) > len(shape):
        return None
    *outer, rows, columns = shape
    *own, height, width = [1] * (len(shape) - len(term)) + list(term)
    if height not in (1, rows) or width not in (1, columns):
        return None
    if any(one not in (1, size) for one, size in zip(own, outer, strict=True)):
        return None
    several = [dim for dim, size in enumerate(own) if size > 1]
    if not several:
        return AddendPlace(1, 1, (height, width))
    first, last = several[0], several[-1]
    if list(own[first : last + 1]) != outer[first : last + 1]:
        return None
    return AddendPlace(prod(outer[last + 1 :]), prod(own), (height, width))


def reshape_scores(volume: ShardedVolume, target: Sequence[int], reshaped: Reshaped) -> ShardedVolume | None:
    """Return waiting scores whose dims in front of the last two are split or merged; None for any other shape.

    Parameters
    ----------
    volume
        The waiting scores.
    target
        Its new shape.
    reshaped
        Reshapes a volume, which shows the new cut dim; returns None if planes would change shards.
    """
    waiting = take_up(volume)
    if waiting is None or len(target) < 3 or list(target[-2:]) != list(volume.shape[-2:]):
        return None
    outline = reshaped(ShardedVolume(volume._slabs, volume.dims, volume.shape, volume.context, volume.merged))
    if not is_cut_once(outline):
        return None
    stand_ins = outline._slabs

    def compute(slabs: Sequence[Tensor]) -> list[Tensor]:
        return [slab.reshape(outlined.shape) for slab, outlined in zip(slabs, stand_ins, strict=True)]

    later = WaitingScores(waiting.steps, volume, compute, stand_ins, waiting.unchanged)
    return defer(later, outline.dims, outline.shape, volume.context, outline.merged)


def soften(func: Callable[[Tensor], Tensor], volume: ShardedVolume, dtype: torch.dtype | None) -> ShardedVolume | None:
    """Return the waiting softmax over the last dim; None if a softmax was taken before.

    Parameters
    ----------
    func
        Computes the softmax of a slab.
    volume
        The waiting scores.
    dtype
        Element type of the result, if given.
    """
    waiting = take_up(volume)
    if waiting is None or waiting.steps.is_softened or dtype not in (None, *WIDTHS):
        return None
    if dtype is None:
        dtype = volume.dtype if waiting.autocast is None else torch.float32
    steps = replace(waiting.steps, is_softened=True)
    return _go_on(volume, waiting, steps, lambda slabs: list(map(func, slabs)), dtype)


def cast(volume: ShardedVolume, dtype: torch.dtype) -> ShardedVolume | None:
    """Return the volume in another element type, still waiting; None if the kernels do not compute in it."""
    if dtype == volume.dtype:
        return volume
    waiting = take_up(volume)
    if waiting is None or dtype not in WIDTHS:
        return None
    return _go_on(volume, waiting, waiting.steps, lambda slabs: [slab.to(dtype) for slab in slabs], dtype)


def _has_kernel(slab: Tensor) -> bool:
    return attention.takes(slab)


def _go_on(
    volume: ShardedVolume, waiting: WaitingScores, steps: Steps, compute: Compute, dtype: torch.dtype, *read: Tensor
) -> ShardedVolume:
    """Return the next step, of the same shape."""
    stand_ins = [outline_slab(slab.shape, dtype, slab.device) for slab in volume._slabs]
    unchanged = waiting.unchanged.including(*read) if read else waiting.unchanged
    later = WaitingScores(steps, volume, compute, stand_ins, unchanged)
    return defer(later, volume.dims, volume.shape, volume.context, volume.merged)
