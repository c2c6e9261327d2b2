"""A transposed convolution that waits: where memory matters most, the reader of its result writes it tile by tile.

Its kernel is as wide as its stride, as in nearly all layers that lead a level up: each input plane has its own output
planes. A join behind it keeps the coarse input instead of the result, which has eight times as many voxels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution.settings import Settings
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, copy_into
from volseg.parallel.spatial.lazy.recipes import WaitingRecipe, recipe_of_kept
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.sources import Asked, Moment, Recipe, Unchanged, Write, add_in_float32, split_rows
from volseg.parallel.spatial.volume import ShardedVolume, defer


@dataclass(frozen=True, slots=True)
class TransposedSettings:
    """How a transposed convolution is computed in tiles.

    Attributes
    ----------
    settings
        Settings of the convolution: its stride is its kernel, without padding.
    channels
        Channels of the result.
    tiles
        Number of tiles of the input's planes that the backward pass takes.
    layout
        Layout of all slabs.
    """

    settings: Settings
    channels: int
    tiles: int
    layout: torch.memory_format

    def compute_output_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the result for an input of this shape."""
        sides = [side * stride for side, stride in zip(shape[DIM:], self.settings.stride, strict=True)]
        return [shape[0], self.channels, *sides]

    def compute_input_shape(self, planes: int, like: Tensor, channels: int) -> list[int]:
        """Return the shape of ``planes`` input planes, for planes of a result like ``like``."""
        sides = [side // stride for side, stride in zip(like.shape[DIM + 1 :], self.settings.stride[1:], strict=True)]
        return [like.shape[0], channels, planes, *sides]


def convolve_later(
    volume: ShardedVolume, weights: Sequence[Tensor], biases: Sequence[Tensor], how: TransposedSettings
) -> ShardedVolume:
    """Return the waiting result of a transposed convolution.

    Parameters
    ----------
    volume
        The input; each shard's planes of the result are those of its slab.
    weights, biases
        One for each slab, of the volume's dtype; empty without a bias.
    how
        See ``TransposedSettings``.
    """
    source = volume.pending.spare(volume) or recipe_of_kept(volume.slabs)
    slabs = list(volume._slabs)
    moment = Moment()
    parameters = [(*own,) for own in zip(weights, biases, strict=True)] if biases else [(own,) for own in weights]
    rows = tuple((*own, *row) for own, row in zip(parameters, source.rows, strict=True))
    recipe = Recipe(rows, Transpose(source.write, bool(biases), how))
    likes = [
        torch.empty(how.compute_output_shape(slab.shape), dtype=weight.dtype, device="meta", memory_format=how.layout)
        for slab, weight in zip(slabs, weights, strict=True)
    ]

    def record(fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        with moment.restored():
            return list(_Transposed.apply((fill, source, how, len(biases)), *weights, *biases, *slabs))

    waiting = WaitingRecipe(recipe, likes, record, Unchanged([*slabs, *recipe.tensors]), slabs)
    return defer(waiting, volume.dims, how.compute_output_shape(volume.shape), volume.context)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transposed convolution of planes from ``write``; takes the weight, the bias if any, and the planes' tensors."""

    write: Write
    has_bias: bool
    how: TransposedSettings

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Compute planes of the result, from one tile of input planes at a time."""
        weight, *row = tensors
        bias = row.pop(0) if self.has_bias else None
        stride, count = self.how.settings.stride[0], out.shape[DIM]
        first, last = start // stride, -(-(start + count) // stride)
        for begin, end in spans(last - first, min(self.how.tiles, last - first)):
            given = write_planes(self.write, row, weight, out, first + begin, first + end, self.how)
            part = torch.ops.aten.convolution(given, weight, bias, *self.how.settings.arguments)
            # The first and the last requested plane may be in the middle of an input plane's outputs.
            at = (first + begin) * stride
            low, high = max(at, start), min(at + part.shape[DIM], start + count)
            copy_into(part.narrow(DIM, low - at, high - low), out.narrow(DIM, low - start, high - low))


def write_planes(
    write: Write, row: Sequence[Tensor], weight: Tensor, like: Tensor, first: int, last: int, how: TransposedSettings
) -> Tensor:
    """Return newly written input planes of a transposed convolution whose result is like ``like``."""
    shape = how.compute_input_shape(last - first, like, weight.shape[0])
    given = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=how.layout)
    write(row, given, first)
    return given


class _Transposed(torch.autograd.Function):
    """Takes a weight for each slab, then a bias for each slab if any, then the input's slabs."""

    @staticmethod
    def forward(ctx: Any, work: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        fill, source, ctx.how, ctx.num_biases = work
        rows = source.rows
        ctx.write, ctx.sizes = source.write, list(map(len, rows))
        ctx.save_for_backward(*tensors[: len(rows)], *chain.from_iterable(rows))
        return tuple(fill())

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(gradients)
        saved = ctx.saved_tensors  # read once: a checkpoint recomputes them at every read
        asked = Asked.of(ctx, count)
        each = zip(gradients, saved[:count], split_rows(saved[count:], ctx.sizes), strict=True)
        found = [_differentiate(ctx, *own, asked) for own in each]
        inputs, weights, biases = zip(*found, strict=True)
        return None, *weights, *(biases if ctx.num_biases else ()), *inputs


def _differentiate(
    ctx: Any, gradient: Tensor, weight: Tensor, row: Sequence[Tensor], asked: Asked
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a slab, of the weight and of the bias; parameters' gradients are summed over tiles."""
    how, stride = ctx.how, ctx.how.settings.stride[0]
    bias_sizes = [how.channels] if asked.bias else None
    planes = gradient.shape[DIM] // stride
    whole: Tensor | None = None
    sums: list[Tensor | None] = [None, None]
    for start, stop in spans(planes, min(how.tiles, planes)):
        given = write_planes(ctx.write, row, weight, gradient, start, stop, how)
        own = gradient.narrow(DIM, start * stride, (stop - start) * stride)
        arguments = how.settings.arguments
        of_input, *rest = torch.ops.aten.convolution_backward(own, given, weight, bias_sizes, *arguments, [*asked])
        if of_input is not None:
            if whole is None:
                shape = how.compute_input_shape(planes, gradient, weight.shape[0])
                whole = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=how.layout)
            whole.narrow(DIM, start, stop - start).copy_(of_input)
        sums = [add_in_float32(total, part) for total, part in zip(sums, rest, strict=True)]
    of_weight, of_bias = (None if total is None else total.to(weight.dtype) for total in sums)
    return whole, of_weight, of_bias
