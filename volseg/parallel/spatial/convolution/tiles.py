"""Convolve this process's slabs tile by tile: an input that has a recipe is never materialized whole.

A tile is some planes of the output and equally many of the input's gradient. Its part of the input is written from the
recipe when it is needed, forward and backward, with the planes around it that the kernel reaches::

    input            | zeros or halo |    slab, of which a tile and what it reaches is written    | zeros or halo |
    output           |               | tile | tile | tile | tile | tile | tile | tile | tile | tile |             |

So on a level's way up, the join, its normalised and activated channels, and its gradient are not materialized. The
tensors that norms keep (a convolution's output) and the gradients that autograd passes on remain. Norms do not change:
their statistics and sums are of whole slabs, which are in memory anyway.

A tile's planes of the output, and of the input's gradient, are the same sums as in a whole slab. The gradient of the
weight is added over tiles in float32 at least. Slabs of several shards first exchange the few planes at their borders,
which are written separately.

A transposed convolution whose kernel is as wide as its stride, as in nearly all layers that lead a level up, waits: its
result is written tile by tile when it is read, since each input plane has its own output planes. A join behind it keeps
the coarse input instead of the result, which has eight times as many voxels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.convolution.settings import Settings
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, copy_into, layout_of
from volseg.parallel.spatial.convolution.plan import ConvolutionPlan
from volseg.parallel.spatial.lazy.recipes import Copy, WaitingRecipe, recipe_of_kept
from volseg.parallel.spatial.plan.shards import Span, spans
from volseg.parallel.spatial.sources import (
    Asked,
    Moment,
    Recipe,
    Unchanged,
    Write,
    add_in_float32,
    mask_asked,
    split_rows,
)
from volseg.parallel.spatial.transport.halo import Halo, start_filling
from volseg.parallel.spatial.volume import ShardedVolume, defer


def convolve_by_tiles(
    volume: ShardedVolume, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan
) -> ShardedVolume | None:
    """Convolve the slabs of this process; None if they must be written whole, since they have no recipe."""
    context = volume.context
    if not volume.dtype.is_floating_point:
        return None
    recipe = volume.pending.spare(volume)
    if recipe is None:
        return None
    dtype, weights, biases = context.spread_for(volume, weight, bias)
    columns = [volume.pending.narrow(volume, dtype)]
    if volume.pending.parts is not None:
        columns, volume.is_bypassed = volume.pending.parts, True
    work = plan, recipe, [slab.shape for slab in volume._slabs], (volume.dtype, dtype), len(biases), None
    results = _ConvolveByTiles.apply(work, *weights, *biases, *chain.from_iterable(columns))
    volume.pending.release(volume)
    shape = list(results[0].shape)
    shape[volume.dims[0]] = plan.outputs
    return ShardedVolume(results, volume.dims, shape, context)


def convolve_later(
    volume: ShardedVolume, weights: Sequence[Tensor], biases: Sequence[Tensor], plan: ConvolutionPlan
) -> ShardedVolume:
    """Return the waiting result of a transposed convolution without padding, whose stride is its kernel.

    Parameters
    ----------
    volume
        The input; each shard's planes of the result are those of its slab.
    weights, biases
        One for each slab, of the volume's dtype; empty without a bias.
    plan
        Its tiles are of the input's planes.
    """
    source = volume.pending.spare(volume) or recipe_of_kept(volume.slabs)
    slabs, moment = list(volume._slabs), Moment()
    parameters = [(*own,) for own in zip(weights, biases, strict=True)] if biases else [(own,) for own in weights]
    rows = tuple((*own, *row) for own, row in zip(parameters, source.rows, strict=True))
    recipe = Recipe(rows, Transpose(source.write, bool(biases), plan))

    def shape_of(given: torch.Size) -> list[int]:
        sides = [side * stride for side, stride in zip(given[DIM:], plan.settings.stride, strict=True)]
        return [given[0], weights[0].shape[1] * plan.settings.groups, *sides]

    dtype, layout = weights[0].dtype, _find_layout(plan)
    likes = [torch.empty(shape_of(slab.shape), dtype=dtype, device="meta", memory_format=layout) for slab in slabs]

    def record(fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        work = plan, source, [slab.shape for slab in slabs], (dtype, dtype), len(biases), fill
        with moment.restored():
            return list(_ConvolveByTiles.apply(work, *weights, *biases, *slabs))

    waiting = WaitingRecipe(recipe, likes, record, Unchanged([*slabs, *recipe.tensors]), slabs)
    return defer(waiting, volume.dims, shape_of(volume.shape), volume.context)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transposed convolution of planes from ``write``; takes the weight, the bias if any, and the planes' tensors."""

    write: Write
    has_bias: bool
    plan: ConvolutionPlan

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Compute planes of the result, from one tile of input planes at a time."""
        weight, *row = tensors
        bias = row.pop(0) if self.has_bias else None
        (stride, *others), count = self.plan.settings.stride, out.shape[DIM]
        first, last = start // stride, -(-(start + count) // stride)
        sides = [side // step for side, step in zip(out.shape[DIM + 1 :], others, strict=True)]
        shape, dtype = torch.Size([len(out), len(weight), last, *sides]), weight.dtype
        slab = _Surrounded(shape, dtype, dtype, _find_layout(self.plan), self.write, row, ())
        for begin, end in spans(last - first, min(self.plan.tiles, last - first)):
            given = slab.cut(first + begin, first + end)
            part = choice.convolve(given, weight, bias, self.plan.settings, self.plan.channels_last)
            # The first and the last requested plane may be in the middle of an input plane's outputs.
            at = (first + begin) * stride
            low, high = max(at, start), min(at + part.shape[DIM], start + count)
            copy_into(part.narrow(DIM, low - at, high - low), out.narrow(DIM, low - start, high - low))


def _find_layout(plan: ConvolutionPlan) -> torch.memory_format:
    return torch.channels_last_3d if plan.channels_last else torch.contiguous_format


@dataclass(frozen=True, slots=True)
class _Surrounded:
    """A slab that can be written from its recipe, between its surrounding planes."""

    shape: torch.Size
    kept_in: torch.dtype
    dtype: torch.dtype
    layout: torch.memory_format
    write: Write
    row: Sequence[Tensor]
    borders: Sequence[Tensor]
    """The neighbours' planes in front and behind; empty where there are zeros."""

    def cut(self, start: int, stop: int) -> Tensor:
        """Write some planes, counted from the slab's first one."""
        shape = [*self.shape[:DIM], stop - start, *self.shape[DIM + 1 :]]
        device = self.row[0].device
        out = torch.empty(shape, dtype=self.kept_in, device=device, memory_format=self.layout)
        planes = self.shape[DIM]
        first, last = max(start, 0), min(stop, planes)
        self._fill(out.narrow(DIM, 0, first - start), 0, start)
        self.write(self.row, out.narrow(DIM, first - start, last - first), first)
        self._fill(out.narrow(DIM, last - start, stop - last), 1, 0)
        return out.to(self.dtype)

    def view(self, start: int, stop: int) -> Tensor:
        """Return planes of a slab that is in memory: a view if no planes around it are needed."""
        inside = start >= 0 and stop <= self.shape[DIM]
        return self.row[0].narrow(DIM, start, stop - start) if inside else self.cut(start, stop)

    def _fill(self, out: Tensor, side: int, start: int) -> None:
        """Write planes in front of the slab, from ``start`` (negative) on, or the first planes behind it."""
        if not out.shape[DIM]:
            return
        if self.borders:
            border = self.borders[side]
            out.copy_(border.narrow(DIM, border.shape[DIM] + start if start else 0, out.shape[DIM]))
        else:
            out.zero_()


class _ConvolveByTiles(torch.autograd.Function):
    """Function of a weight for each slab, a bias for each slab if any, and the slabs of each joined volume."""

    @staticmethod
    def forward(ctx: Any, work: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # ``dtypes``: element types of the slabs and of the computation. ``fill`` returns results that wait.
        ctx.plan, recipe, ctx.shapes, ctx.dtypes, ctx.num_biases, fill = work
        count, rows, ctx.write = len(ctx.shapes), recipe.rows, recipe.write
        weights, biases = tensors[:count], tensors[count : count + ctx.num_biases]
        ctx.columns = [(part.shape[1], part.dtype) for part in tensors[count + ctx.num_biases :: count]]
        slabs = _surround(ctx, rows, [() for _ in rows])
        borders = _exchange(slabs, ctx.plan.halos)
        kept = list(chain.from_iterable(zip(borders, rows, strict=True)))
        ctx.sizes = [len(own) for own in kept]
        ctx.save_for_backward(*weights, *chain.from_iterable(kept))
        if fill is not None:
            return tuple(fill())
        slabs = [replace(slab, borders=own) for slab, own in zip(slabs, borders, strict=True)]
        each = zip(slabs, weights, biases or [None] * count, strict=True)
        return tuple(_convolve(*own, ctx.plan) for own in each)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, count = ctx.plan, len(gradients)
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them for each access
        weights, kept = saved[:count], saved[count:]
        asked = Asked.of(ctx, count)
        laid: Sequence[Tensor] = gradients  # those of a transposed convolution are laid out tile by tile
        if not plan.settings.transposed:
            pairs = zip(gradients, weights, strict=True)
            laid = [choice.lay_out_gradient(*pair, plan.settings, plan.channels_last) for pair in pairs]
        around = [_Surrounded(own.shape, own.dtype, own.dtype, layout_of(own), Copy(), [own], ()) for own in laid]
        if asked.input:
            borders = _exchange(around, plan.halos)
            around = [replace(own, borders=planes) for own, planes in zip(around, borders, strict=True)]
        rows = split_rows(kept, ctx.sizes)
        slabs = _surround(ctx, rows[1::2], rows[::2])
        found = [_differentiate(ctx, *own, asked) for own in zip(around, slabs, weights, strict=True)]
        inputs = list(chain.from_iterable(zip(*(own[0] for own in found), strict=True)))
        biases = [own[2] for own in found] if ctx.num_biases else []
        return None, *(own[1] for own in found), *biases, *mask_asked(ctx, inputs)


def _surround(ctx: Any, rows: Sequence[Sequence[Tensor]], borders: Sequence[Sequence[Tensor]]) -> list[_Surrounded]:
    """Return the slabs that are written from these tensors."""
    layout, (kept_in, dtype) = _find_layout(ctx.plan), ctx.dtypes
    each = zip(ctx.shapes, rows, borders, strict=True)
    return [_Surrounded(shape, kept_in, dtype, layout, ctx.write, row, own) for shape, row, own in each]


def _exchange(slabs: Sequence[_Surrounded], halos: Sequence[Halo]) -> list[Sequence[Tensor]]:
    """Fetch the planes in front of each slab and behind it; the planes that neighbours need are written separately.

    The exchanged buffers are slabs without their inner planes.
    """
    if not halos:
        return [() for _ in slabs]
    buffers = []
    for slab, halo in zip(slabs, halos, strict=True):
        width, _ = halo.own
        front, back = slab.cut(0, width), slab.cut(slab.shape[DIM] - width, slab.shape[DIM])
        shape = [*front.shape[:DIM], 4 * width, *front.shape[DIM + 1 :]]
        buffer = torch.empty(shape, dtype=front.dtype, device=front.device, memory_format=slab.layout)
        buffer.narrow(DIM, width, width).copy_(front)
        buffer.narrow(DIM, 2 * width, width).copy_(back)
        buffers.append(buffer)
    start_filling(buffers, halos)()
    found = zip(buffers, halos, strict=True)
    return [[planes.clone() for planes in halo.view_around(buffer)] for buffer, halo in found]


def _find_pad(plan: ConvolutionPlan) -> int:
    """Return the number of planes in front of a slab that its first output plane reaches."""
    return plan.halos[0].own[0] if plan.halos else plan.settings.padding[0]


def _pad_by(settings: Settings, planes: int) -> Settings:
    """Return the settings with this many planes of zeros at both ends: a tile comes with its surrounding planes."""
    return replace(settings, padding=(planes, *settings.padding[1:]))


def _convolve(slab: _Surrounded, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> Tensor:
    """Return the convolution of a slab."""
    pad, whole = _find_pad(plan), None
    for start, stop in spans(slab.shape[DIM], plan.tiles):
        settings = _pad_by(plan.settings, 0)
        part = choice.convolve(slab.cut(start - pad, stop + pad), weight, bias, settings, plan.channels_last)
        if whole is None:
            shape = [*part.shape[:DIM], slab.shape[DIM], *part.shape[DIM + 1 :]]
            whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout_of(part))
        whole.narrow(DIM, start, stop - start).copy_(part)
        del part  # before the next tile is written
    assert whole is not None
    return whole


def _differentiate(
    ctx: Any, gradient: _Surrounded, slab: _Surrounded, weight: Tensor, asked: Asked
) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]:
    """Return the gradients of the volumes that are joined in a slab, of the weight and of the bias."""
    plan = ctx.plan
    sums: list[Tensor | None] = [None, None]
    parts: list[Tensor | None] = [None] * len(ctx.columns)
    if asked.input:
        own = [([slab.shape[0], channels, *slab.shape[DIM:]], dtype) for channels, dtype in ctx.columns]
        device = gradient.row[0].device
        parts = [torch.empty(s, dtype=dtype, device=device, memory_format=slab.layout) for s, dtype in own]
    for start, stop in spans(slab.shape[DIM], plan.tiles):
        of_input, *found = _differentiate_tile(plan, (start, stop), gradient, slab, weight, asked)
        sums = [add_in_float32(total, part) for total, part in zip(sums, found, strict=True)]
        if of_input is not None:
            _hand_out(of_input, parts, start)
        del of_input, found  # before the next tile is written
    of_weight, of_bias = (None if total is None else total.to(weight.dtype) for total in sums)
    return parts, of_weight, of_bias


def _hand_out(tile: Tensor, parts: Sequence[Tensor | None], start: int) -> None:
    """Copy the gradients of joined channels to the gradients of the joined volumes."""
    channels = [part.shape[1] for part in parts if part is not None]
    for part, split in zip(parts, tile.split(channels, 1), strict=True):
        assert part is not None
        part.narrow(DIM, start, tile.shape[DIM]).copy_(split)


def _differentiate_tile(
    plan: ConvolutionPlan, tile: Span, gradient: _Surrounded, slab: _Surrounded, weight: Tensor, asked: Asked
) -> Sequence[Tensor | None]:
    """Return the gradients of a tile's input planes, and the tile's share of the gradients of weight and bias."""
    start, stop = tile
    pad, last = _find_pad(plan), plan.channels_last
    transposed, step = plan.settings.transposed, plan.settings.stride[0]  # the step of others is 1
    bias_sizes = [weight.shape[1] * plan.settings.groups if transposed else weight.shape[0]] if asked.bias else None
    own = gradient.row[0].narrow(DIM, start * step, (stop - start) * step)
    if transposed:
        own = choice.lay_out_gradient(own, weight, plan.settings, last)
    given = slab.cut(start - pad, stop + pad)
    # If a voxel reaches no other plane, one pass may compute all gradients.
    at_once = asked._replace(input=asked.input and not pad)
    found = list(choice.differentiate(own, given, weight, bias_sizes, _pad_by(plan.settings, 0), last, at_once))
    if asked.input and pad:
        like = given.narrow(DIM, 0, stop - start)
        around = gradient.view(start - pad, stop + pad)
        wide = _pad_by(plan.settings, 2 * pad)
        found[0] = choice.differentiate(around, like, weight, None, wide, last, (True, False, False))[0]
    return found
