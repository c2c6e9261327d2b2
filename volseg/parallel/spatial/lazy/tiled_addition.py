"""A sum that is larger than its terms: its reader writes it tile by tile.

V-Net adds a norm in half precision to the repeated image in float32, and the sum is float32 as in the plain network: 64
bytes per voxel, computed from 36. Where memory matters most (``checkpoint="tiled"``) such a sum keeps only its recipe,
``act(norm(x) + y)`` with ``y`` from its own recipe, and the backward pass writes both terms again, some planes at a
time. The rounding is the same as in a sum that is stored.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.layout import DIM, copy_into, layout_of
from volseg.device.norm import choice
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.parallel.spatial.lazy.norm import WaitingNorm, find_norm, sum_to_slope
from volseg.parallel.spatial.lazy.recipes import WaitingRecipe
from volseg.parallel.spatial.lazy.statistics import NormPlan
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.sources import Recipe, Write, outline_slab, split_rows
from volseg.parallel.spatial.volume import ShardedVolume, defer


def add_later(first: Any, second: Any, tiles: int) -> ShardedVolume | None:
    """Return the waiting sum of a waiting norm and a volume with more digits and a recipe; None for other terms.

    Parameters
    ----------
    first, second
        The terms.
    tiles
        Number of pieces in which a slab is written.
    """
    waiting = _find(first, second, tiles) or _find(second, first, tiles)
    return None if waiting is None else defer(waiting, first.dims, first.shape, first.context)


def _find(first: Any, second: Any, tiles: int) -> "TiledSum | None":
    norm = find_norm(first, second)
    if norm is None or isinstance(second.pending, WaitingNorm) or not has_fewer_digits(first.dtype, second.dtype):
        return None
    recipe = second.pending.spare(second)
    if recipe is None:
        return None
    second.is_bypassed = second.is_bypassed or second.pending.parts is not None
    return TiledSum(norm, second, recipe, tiles)


def has_fewer_digits(first: torch.dtype, second: torch.dtype) -> bool:
    """Return whether a norm's input of the first type takes less memory than its sum with the second type (half)."""
    return first.is_floating_point and second.is_floating_point and first.itemsize < second.itemsize


@dataclass(frozen=True, slots=True)
class _Addition:
    """Writes the sum from the norm's input, scale and shift, PReLU's slope if any, and the other term's tensors."""

    inner: Activation
    has_slope: bool
    write: Write
    kept_in: torch.dtype
    """Element type that ``write`` writes."""
    dtype: torch.dtype
    """Element type of the sum."""
    planes: int
    """Number of planes to write at a time."""
    activation: Activation = IDENTITY

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write planes of the sum."""
        for begin, end in self.cut(out.shape[DIM]):
            tile = out.narrow(DIM, begin, end - begin)
            copy_into(choice.add(*self.read(tensors, start + begin, end - begin), self.activation), tile)

    def cut(self, planes: int) -> list[tuple[int, int]]:
        """Return the spans of planes to write at a time."""
        return spans(planes, -(-planes // self.planes)) if planes else []

    def read(self, tensors: Sequence[Tensor], start: int, count: int, mean: Tensor | None = None) -> tuple[Term, Term]:
        """Return some planes of both terms, the norm and the plain term, in the sum's type."""
        slab, scale, shift, *row = tensors
        slope = row.pop(0) if self.has_slope else None
        planes = slab.narrow(DIM, start, count)
        other = torch.empty(planes.shape, dtype=self.kept_in, device=slab.device, memory_format=layout_of(slab))
        self.write(row, other, start)
        return Term(planes.to(self.dtype), mean, scale, shift, self.inner, slope), Term(other.to(self.dtype))


class TiledSum(WaitingRecipe):
    """A norm with its activation, if any, plus a volume with a recipe, and an activation of the sum, if any.

    Parameters
    ----------
    norm
        The first term.
    second
        The second term.
    recipe
        Recipe of the second term.
    tiles
        Number of pieces in which a slab is written.
    """

    def __init__(self, norm: WaitingNorm, second: ShardedVolume, recipe: Recipe, tiles: int) -> None:
        self.context, self.norm = norm.context, norm
        # With a recipe only the history of the slabs is used.
        self.columns = second.pending.parts or [second._slabs]
        dtype = torch.promote_types(norm.stand_ins[0].dtype, second.dtype)
        # Half of a tile: six tensors of this size and the sum's type exist at a time.
        planes = -(-min(slab.shape[DIM] for slab in norm.stand_ins) // (2 * tiles))
        has_slope = norm.slope is not None
        self.write_sum = _Addition(norm.activation, has_slope, recipe.write, second.dtype, dtype, planes)
        with norm.moment.restored():
            self.slopes: list[Tensor] = [] if norm.slope is None else self.context.spread(norm.slope)
        found = [self.context.spread(value) for value in (norm.found.scale, norm.found.shift)]
        detached = [[slope.detach() for slope in self.slopes]] if has_slope else []
        own = zip(norm.stand_ins, *found, *detached, strict=True)
        rows = tuple((*mine, *row) for mine, row in zip(own, recipe.rows, strict=True))
        self.recipe = Recipe(rows, self.write_sum)
        self.likes = [torch.empty_like(slab, dtype=dtype, device="meta") for slab in norm.stand_ins]
        self.moment = norm.moment
        self.unchanged = norm.unchanged.including(*chain.from_iterable(self.columns), *recipe.tensors)
        self.stand_ins = [outline_slab(slab.shape, dtype, slab.device) for slab in norm.stand_ins]

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "TiledSum | None":
        """Return the sum with an activation; None if it has one, the activation has a slope, or the modes changed.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.write_sum.activation != IDENTITY or slope is not None or not self.moment.is_now():
            return None
        taken = copy(self)
        taken.write_sum = replace(self.write_sum, activation=activation)
        taken.recipe = Recipe(self.recipe.rows, taken.write_sum)
        return taken

    def hold(self, volume: ShardedVolume) -> Recipe | None:
        """Leave the sum unwritten."""
        return self.spare(volume)

    def outline_in(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the sum's history for an operator that reads it in another type, and whose gradient has that type."""
        return self.outline_as(dtype)

    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the slabs, with the history of both terms."""
        norm = self.norm
        with self.moment.restored():
            slabs = _AddInTiles.apply(
                self, fill, norm.weight, norm.bias, *self.slopes, *norm.stand_ins, *chain.from_iterable(self.columns)
            )
        return list(slabs)


class _AddInTiles(torch.autograd.Function):
    """Takes weight and bias, a slope per slab if any, the norm's slabs, then the other term's slabs."""

    @staticmethod
    def forward(
        ctx: Any, waiting: TiledSum, fill: Callable[[], list[Tensor]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        norm = waiting.norm
        weight, *_ = tensors
        ctx.plan = NormPlan.of(norm)
        ctx.write, ctx.sizes = waiting.write_sum, [len(row) for row in waiting.recipe.rows]
        ctx.columns = [(column[0].shape[1], column[0].dtype) for column in waiting.columns]
        ctx.save_for_backward(norm.found.mean, norm.found.rstd, weight, *chain.from_iterable(waiting.recipe.rows))
        return tuple(fill())

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, rstd, weight, *kept = ctx.saved_tensors
        rows = split_rows(kept, ctx.sizes)
        means = ctx.plan.context.spread(mean)
        slabs = [row[0] for row in rows]
        sums = [_add_sums(ctx.write, *own) for own in zip(gradients, rows, means, strict=True)]
        factors, of_weight, of_bias = ctx.plan.combine(sums, mean, rstd, weight, slabs)
        first = 4 + len(slabs) * (1 + ctx.plan.has_slope)
        columns = [
            own if any(ctx.needs_input_grad[first + place * len(slabs) :][: len(slabs)]) else (own[0], None)
            for place, own in enumerate(ctx.columns)
        ]
        each = zip(gradients, rows, factors, strict=True)
        found_inputs = [_differentiate(ctx.write, *own, columns) for own in each]
        inputs = list(zip(*found_inputs, strict=True))
        ctx.plan.note_vanishing(mean, inputs[0], factors)
        slopes = [row[3] for row in rows] if ctx.plan.has_slope else []
        of_slopes = [sum_to_slope(own, slope) for own, slope in zip(sums, slopes, strict=False)]
        return None, None, of_weight, of_bias, *of_slopes, *chain.from_iterable(inputs)


def _add_sums(write: _Addition, gradient: Tensor, row: Sequence[Tensor], mean: Tensor) -> Tensor:
    """Return the sums of a slab's parts, for all tiles (see ``choice.add_sums``)."""
    parts = []
    for start, stop in write.cut(gradient.shape[DIM]):
        own = gradient.narrow(DIM, start, stop - start).to(write.dtype)
        parts += choice.add_sums(own, *write.read(row, start, stop - start, mean), write.activation)
    return torch.cat(parts)


Column = tuple[int, torch.dtype | None]
"""Channels of a joined volume, and the type of its gradient; None if no gradient is wanted."""


def _differentiate(
    write: _Addition, gradient: Tensor, row: Sequence[Tensor], found: tuple[Tensor, Tensor], columns: Sequence[Column]
) -> list[Tensor | None]:
    """Return the gradients of the norm's input and of each volume joined in the other term, in the given types."""
    slab = row[0]
    layout = layout_of(slab)
    of_norm = torch.empty_like(slab)
    parts = [
        None
        if dtype is None
        else torch.empty(
            [slab.shape[0], channels, *slab.shape[DIM:]], dtype=dtype, device=slab.device, memory_format=layout
        )
        for channels, dtype in columns
    ]
    any_wanted = any(part is not None for part in parts)
    for start, stop in write.cut(slab.shape[DIM]):
        planes = stop - start
        own = gradient.narrow(DIM, start, planes).to(write.dtype)
        terms = write.read(row, start, planes)
        first, second = choice.add_gradients(own, *terms, [found], write.activation, both=any_wanted)
        copy_into(first, of_norm.narrow(DIM, start, planes))
        splits = () if second is None else second.split([channels for channels, _ in columns], 1)
        for part, split in zip(parts, splits, strict=second is not None):
            if part is not None:
                copy_into(split, part.narrow(DIM, start, planes))
        del own, terms, first, second, splits  # before the next tile is written
    return [of_norm, *parts]
