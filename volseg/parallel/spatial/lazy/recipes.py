"""Recipes that compute a slab again from tensors that are kept anyway.

A convolution must keep its input for the gradient of its weights. If this input is a norm and an activation applied to
a convolution's output, which the norm keeps already, the convolution keeps a *recipe* instead. It saves half of the
activations for one pass over memory in the backward pass.

A recipe separates its tensors from its function: autograd keeps the tensors, where hooks can see them (recomputation
drops them, offloading moves them), and the operator keeps only ``write``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from volseg.device.first_order import LinearMap
from volseg.device.layout import DIM, copy_into, layout_of
from volseg.parallel.spatial.pending import PLAIN, Released, Waiting, Written, build_meta_slabs
from volseg.parallel.spatial.sources import Moment, Recipe, Unchanged, Write, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait, compute_halo_room, write_outer_first
from volseg.parallel.spatial.transport.pieces import allocate_with_room
from volseg.parallel.spatial.volume import ShardedVolume, defer


def narrow_planes(slab: Tensor, start: int, count: int) -> Tensor:
    """Return planes of a slab; the slab itself if they are all."""
    return slab if slab.shape[DIM] == count else slab.narrow(DIM, start, count)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a slab that other code keeps."""

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy planes of the slab."""
        copy_into(narrow_planes(tensors[0], start, out.shape[DIM]), out)


@dataclass(frozen=True, slots=True)
class Convert:
    """Writes planes with ``write``, in ``dtype``, and converts them to the reader's type."""

    write: Write
    dtype: torch.dtype

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write planes, and convert them to the type of ``out``."""
        if out.dtype == self.dtype:
            self.write(tensors, out, start)
            return
        own = torch.empty_like(out, dtype=self.dtype)
        self.write(tensors, own, start)
        out.copy_(own)


@dataclass(frozen=True, slots=True)
class Join:
    """Joins the channels of several slabs; each has its ``write``, its number of tensors and its number of channels."""

    writes: tuple[Write, ...]
    counts: tuple[int, ...]
    channels: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write each part into its channels."""
        for write, own, (first, count) in self.parts(tensors):
            write(own, out.narrow(1, first, count), start)

    def parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Write, Sequence[Tensor], tuple[int, int]]]:
        """Yield each part's ``write``, its tensors, and its first channel and number of channels."""
        first = used = 0
        for write, number, count in zip(self.writes, self.counts, self.channels, strict=True):
            yield write, tensors[used : used + number], (first, count)
            first, used = first + count, used + number


def recipe_of_kept(slabs: Sequence[Tensor]) -> Recipe:
    """Return the recipe of slabs that other code keeps."""
    return Recipe(tuple((slab,) for slab in slabs), Copy())


def join_recipes(parts: Sequence[Recipe], channels: Sequence[int]) -> Recipe:
    """Return the recipe of joined slabs; parts that are joins themselves are flattened."""
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


Record = Callable[[Callable[[], list[Tensor]]], list[Tensor]]
"""Returns the slabs that a function computes, with their history."""


class WaitingRecipe(Waiting):
    """Waiting slabs whose recipe is known before they are written.

    Parameters
    ----------
    recipe
        Writes the slabs.
    likes
        Tensors of the shape, element type and layout of each slab; mostly on the meta device.
    record
        See ``Record``.
    unchanged, stand_ins
        See ``Waiting``.

    Attributes
    ----------
    room
        Planes of room to leave around each slab (see ``transport.pieces``), or more if a wider halo follows.
    keeps_recipe
        Whether the slabs can be written again: their recipe needs no more memory than they do.
    may_cast
        Whether an operator that reads unwritten slabs in another type returns a gradient of that type.
    """

    room = 0
    keeps_recipe = True
    may_cast: ClassVar[bool] = False

    def __init__(
        self, recipe: Recipe, likes: Sequence[Tensor], record: Record, unchanged: Unchanged, stand_ins: list[Tensor]
    ) -> None:
        self.recipe, self.likes, self.record, self.unchanged = recipe, likes, record, unchanged
        self.stand_ins = list(stand_ins)

    def settle(self, volume: ShardedVolume, halos: Sequence[Halo] = ()) -> Wait | None:
        """Write the slabs."""
        self.check()
        volume._slabs, wait = self.write(halos if self.room else ())
        volume.pending = self._describe_written(volume) if self.keeps_recipe else PLAIN
        return wait

    def spare(self, volume: ShardedVolume) -> Recipe | None:
        """Leave the slabs unwritten, and without memory, for readers of a few planes at a time and backward passes."""
        if not self.keeps_recipe:
            return self.find_recipe(volume)
        self.check()
        volume._slabs = self.outline_as(self.likes[0].dtype)
        written, none = self._describe_written(volume), [0] * len(volume._slabs)
        cast = self.outline_as if self.may_cast else None
        volume.pending = Released(written, none, self.parts, layout_of(self.likes[0]), cast)
        return self.recipe

    def _describe_written(self, volume: ShardedVolume) -> Written:
        return Written(self.recipe, Unchanged((*volume._slabs, *self.recipe.tensors)), self.parts)

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Wait | None]:
        """Return the slabs, and the wait for ``halos``; there are no halos without room."""
        rows, wait = self.recipe.rows, None

        def fill() -> list[Tensor]:
            nonlocal wait
            room = compute_halo_room(self.room, halos)
            outs = [
                allocate_with_room(like, room, device=row[0].device)
                if room
                else torch.empty_like(like, device=row[0].device)
                for like, row in zip(self.likes, rows, strict=True)
            ]

            def planes(number: int, start: int, count: int) -> None:
                self.recipe.write(rows[number], narrow_planes(outs[number], start, count), start)

            wait = write_outer_first(outs, room, halos, planes)
            return outs

        return self.record(fill), wait

    def outline_as(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the slabs without memory, of this element type, with their history."""
        pairs = list(zip(self.likes, self.recipe.rows, strict=True))
        return self.record(lambda: [outline_slab(like.shape, dtype, row[0].device) for like, row in pairs])


def join_channels(parts: Sequence[ShardedVolume], later: bool = False) -> ShardedVolume:
    """Join volumes of one cut along the channels, in slabs with room for their halos.

    The copy waits for the next operator, which can send the halo early. The result's recipe joins the parts' recipes: a
    convolution behind an encoder's skip keeps neither the join nor the activated skip.

    Parameters
    ----------
    parts
        The volumes.
    later
        Whether to wait even if the parts have several element types.
    """
    like = parts[0]
    # In order: one volume may be several of the parts, and each call may change its state.
    recipes = [(part.pending.spare if part.context.tiled else part.pending.find_recipe)(part) for part in parts]
    # With a recipe only the history of the slabs is used: their memory may be released.
    columns = [part.slabs if recipe is None else part._slabs for part, recipe in zip(parts, recipes, strict=True)]
    channels = [column[0].shape[1] for column in columns]
    shape = list(like.shape)
    shape[1] = sum(channels)
    dtypes = [column[0].dtype for column in columns]
    dtype = reduce(torch.promote_types, dtypes)
    mixed = len(set(dtypes)) > 1
    if mixed and not later:
        slabs = [torch.cat(row, 1) for row in zip(*(part.slabs for part in parts), strict=True)]
        return ShardedVolume(slabs, like.dims, shape, like.context)
    found = [recipe or recipe_of_kept(column) for recipe, column in zip(recipes, columns, strict=True)]
    if mixed:
        found = [Recipe(own.rows, Convert(own.write, dtype)) for own, dtype in zip(found, dtypes, strict=True)]
    recipe = join_recipes(found, channels)
    cut_along_depth = like.context.communicator.num_shards > 1 and like.dims == (DIM,)
    # The layout is that of the first volume. A stand-in has the slab's shape, and not its layout.
    firsts = like.pending.likes if isinstance(like.pending, RecomputedInput) else build_meta_slabs(like)
    likes = [
        torch.empty([len(own), shape[1], *own.shape[2:]], dtype=dtype, device="meta", memory_format=layout_of(own))
        for own in firsts
    ]
    moment = Moment()
    slabs = list(chain.from_iterable(columns))

    def split(*gradients: Tensor) -> list[Tensor]:
        return list(chain.from_iterable(zip(*(own.split(channels, 1) for own in gradients), strict=True)))

    def record(fill: Callable[[], list[Tensor]]) -> list[Tensor]:
        with moment.restored():
            return list(LinearMap.apply(lambda *_: tuple(fill()), split, *slabs))

    waiting = WaitingRecipe(recipe, likes, record, Unchanged([*slabs, *recipe.tensors]), columns[0])
    waiting.room = like.context.room if cut_along_depth else 0
    # An operator can hand each part its own gradient; a join without history passes none on.
    waiting.parts = columns if moment.grad_enabled else None
    joined = defer(waiting, like.dims, shape, like.context)
    if mixed:
        waiting.spare(joined)  # its stand-in has the type of one part
    return joined


@dataclass(frozen=True, slots=True)
class Repeat:
    """Writes the channels of a slab ``count`` times, one copy after the other."""

    count: int

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy the channels."""
        (slab,) = tensors
        planes = slab.narrow(DIM, start, out.shape[DIM])
        out.unflatten(1, (self.count, slab.shape[1])).copy_(planes.unsqueeze(1))


class WaitingRepeat(WaitingRecipe):
    """Slabs whose channels will be repeated; they need no gradient.

    V-Net adds its image to each of sixteen channels. This state has its own copy of the image, and a sum reads the copy
    without writing the channels (see ``addition``).

    Parameters
    ----------
    slabs
        ``(B, C, D, H, W)``, without history.
    count
        Number of copies.
    """

    def __init__(self, slabs: Sequence[Tensor], count: int) -> None:
        self.repeated, self.count = list(slabs), count
        moment = Moment()
        shapes = [(slab.shape[0], count * slab.shape[1], *slab.shape[2:]) for slab in slabs]
        pairs = list(zip(shapes, slabs, strict=True))
        likes = [
            torch.empty(shape, dtype=slab.dtype, device="meta", memory_format=layout_of(slab)) for shape, slab in pairs
        ]

        def record(fill: Callable[[], list[Tensor]]) -> list[Tensor]:
            with moment.restored():
                return fill()

        recipe = Recipe(tuple((slab,) for slab in slabs), Repeat(count))
        stand_ins = [outline_slab(shape, slab.dtype, slab.device) for shape, slab in pairs]
        super().__init__(recipe, likes, record, Unchanged(slabs), stand_ins)

    def expand(self) -> list[Tensor] | None:
        """Return views of the slabs that repeat them without memory; None if they have more than one channel."""
        if any(slab.shape[1] != 1 for slab in self.repeated):
            return None
        self.check()
        return [slab.expand(-1, self.count, -1, -1, -1) for slab in self.repeated]

    def hold(self, volume: ShardedVolume) -> Recipe | None:
        """Leave the slabs unwritten: they are larger than their sources."""
        return self.spare(volume)


def repeat_later(volume: ShardedVolume, count: int, tiles: int) -> ShardedVolume | None:
    """Return a waiting volume with repeated channels; None if waiting saves nothing, or a gradient is needed.

    Parameters
    ----------
    volume
        A volume of five dims.
    count
        Number of copies.
    tiles
        Number of pieces in which the result would be written.
    """
    if isinstance(volume.pending, Waiting) or any(slab.requires_grad for slab in volume._slabs):
        return None
    if volume.shape[1] == 1:
        slabs = [slab.detach().clone(memory_format=torch.contiguous_format) for slab in volume.slabs]
    elif tiles > 1:
        slabs = [slab.detach() for slab in volume.slabs]  # a later requires_grad does not concern them
    else:
        return None
    shape = [volume.shape[0], count * volume.shape[1], *volume.shape[2:]]
    return defer(WaitingRepeat(slabs, count), volume.dims, shape, volume.context, volume.merged)


class RecomputedInput(WaitingRecipe):
    """Input of a recomputed block: written without history when an operator reads it, but not when a join does.

    Parameters
    ----------
    recipe, likes, room
        See ``WaitingRecipe``.
    unchanged
        The recipe's tensors as they were when the block ran.
    requires_grad
        Whether the block's input needed a gradient.
    """

    refusal = (
        "the input of a recomputed block was changed in place after the block ran; do that out of place, or leave out "
        "checkpoint="
    )

    def __init__(
        self, recipe: Recipe, likes: Sequence[Tensor], room: int, unchanged: Unchanged, requires_grad: bool
    ) -> None:
        def record(fill: Callable[[], list[Tensor]]) -> list[Tensor]:
            with torch.no_grad():
                slabs = fill()
            return [slab.requires_grad_(requires_grad) for slab in slabs]

        pairs = zip(likes, recipe.rows, strict=True)
        stand_ins = [outline_slab(like.shape, like.dtype, row[0].device) for like, row in pairs]
        for stand_in in stand_ins:
            stand_in.requires_grad_(requires_grad)
        super().__init__(recipe, likes, record, unchanged, stand_ins)
        self.room = room
        self.check()

    def find_recipe(self, volume: ShardedVolume) -> Recipe:
        """Return the recipe, with which an operator writes the slabs elsewhere; they stay unwritten here."""
        del volume
        self.check()
        return self.recipe

    spare = find_recipe
