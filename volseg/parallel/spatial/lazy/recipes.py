"""How to compute a slab again from tensors that are kept anyway.

A convolution must keep its input for the gradient of its weights. Where that input is a norm and an activation
applied to a convolution's output, which the norm keeps already, it keeps this *recipe* instead: one pass over memory
in the backward pass for half of the activations.

What is written is apart from the tensors it is written from: autograd keeps the tensors, where hooks can see them
(recomputation forgets them, offloading moves them), and the operator keeps ``write`` alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from volseg.device.layout import DIM, copy_into, layout_of
from volseg.device.norm import choice
from volseg.device.norm.activation import Activation
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Outline, Recipe, Write, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait, find_needed_room, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room

__all__ = ["Convert", "Copy", "Join", "Normalize", "WaitingRecipe", "add_in_float32", "join_recipes", "recipe_of_kept"]


def _view_planes(slab: Tensor, start: int, out: Tensor) -> Tensor:
    count = out.shape[DIM]
    return slab if slab.shape[DIM] == count else slab.narrow(DIM, start, count)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scale, shift and activation of a convolution's output; PReLU's slope is the last tensor."""

    activation: Activation

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Apply them again."""
        slab, scale, shift, *slope = tensors
        planes = _view_planes(slab, start, out)
        choice.affine(planes, scale, shift, self.activation, out, slope=slope[0] if slope else None)


@dataclass(frozen=True, slots=True)
class Copy:
    """A slab that somebody keeps as it is."""

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy it."""
        copy_into(_view_planes(tensors[0], start, out), out)


@dataclass(frozen=True, slots=True)
class Convert:
    """What ``write`` writes in a type of its own, in the type of whoever reads it."""

    write: Write
    dtype: torch.dtype

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write it, and convert it."""
        if out.dtype == self.dtype:
            self.write(tensors, out, start)
            return
        own = torch.empty_like(out, dtype=self.dtype)
        self.write(tensors, own, start)
        out.copy_(own)


@dataclass(frozen=True, slots=True)
class Join:
    """Channels of several slabs, one behind the other: each one's ``write``, its number of tensors and of channels."""

    writes: tuple[Write, ...]
    counts: tuple[int, ...]
    channels: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write each part into its channels."""
        for write, own, (first, count) in self.parts(tensors):
            write(own, out.narrow(1, first, count), start)

    def parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Write, Sequence[Tensor], tuple[int, int]]]:
        """Yield how to write each part, its tensors, and its first channel and number of channels."""
        first = used = 0
        for write, number, count in zip(self.writes, self.counts, self.channels, strict=True):
            yield write, tensors[used : used + number], (first, count)
            first, used = first + count, used + number


def recipe_of_kept(slabs: Sequence[Tensor]) -> Recipe:
    """Return the recipe of slabs that somebody keeps."""
    return Recipe(tuple((slab,) for slab in slabs), Copy())


def join_recipes(parts: Sequence[Recipe], channels: Sequence[int]) -> Recipe:
    """Return the recipe of slabs side by side; parts that are joins themselves are taken apart."""
    writes: list[Write] = []
    counts: list[int] = []
    widths: list[int] = []
    for part, width in zip(parts, channels, strict=True):
        if isinstance(part.write, Join):
            writes += part.write.writes
            counts += part.write.counts
            widths += part.write.channels
        else:
            writes.append(part.write)
            counts.append(len(part.rows[0]))
            widths.append(width)
    rows = tuple(tuple(chain.from_iterable(rows)) for rows in zip(*(part.rows for part in parts), strict=True))
    return Recipe(rows, Join(tuple(writes), tuple(counts), tuple(widths)))


def add_in_float32(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the sum of a total, None at first, and a part, None where none is asked for; half precision widened."""
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    return wide if total is None else total + wide


class WaitingRecipe(Waiting):
    """Slabs that wait, and whose recipe is known before they are written.

    Attributes
    ----------
    recipe
        How to write them.
    likes
        Shape, element type and layout of each, on the meta device.
    """

    recipe: Recipe
    likes: Sequence[Tensor]
    room = 0

    @abstractmethod
    def record(self, fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the slabs that ``fill`` makes, with their history."""

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Write the slabs."""
        rows, wait = self.recipe.rows, None

        def fill() -> list[Tensor]:
            nonlocal wait
            room = find_needed_room(self.room, halos)
            outs = [
                allocate_with_room(like, room, device=row[0].device)
                if room
                else torch.empty_like(like, device=row[0].device)
                for like, row in zip(self.likes, rows, strict=True)
            ]

            def planes(number: int, start: int, count: int) -> None:
                self.recipe.write(rows[number], outs[number].narrow(DIM, start, count), start)

            wait = write_outer_first(outs, room, halos, planes)
            return outs

        return self.record(fill), self.recipe, wait

    def outline(self) -> Outline | None:
        """Return an outline for readers of a few planes at a time, and for the backward pass."""
        return Outline(self.outline_as(self.likes[0].dtype), self.recipe, layout_of(self.likes[0]))

    def outline_as(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the slabs without memory, of this element type, with their history."""
        pairs = list(zip(self.likes, self.recipe.rows, strict=True))
        return self.record(lambda: [outline_slab(like.shape, dtype, row[0].device) for like, row in pairs])
