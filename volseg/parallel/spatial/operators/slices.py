"""Slices, indices and joins: read and assign voxels by index or range; concatenate and stack volumes.

Integers, slices, None and an ellipsis index slab by slab, along cut dims too: there the slabs are rebalanced. Lists,
tensors and masks index the gathered volume. Assignments to only some planes along the cut, and rare in-place changes,
are also made in the gathered volume. Parts of a join that are whole, or have another cut, are first cut like the first
volume.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import tree_map
from volseg.parallel.spatial.convolution.plan import count_slab_tiles
from volseg.parallel.spatial.dispatch import Copied
from volseg.parallel.spatial.gathered import gather, run_gathered, say_gathered, volumes, whole_of
from volseg.parallel.spatial.lazy.recipes import join_channels
from volseg.parallel.spatial.operators.dims import permute
from volseg.parallel.spatial.operators.operands import aligned, cut_like, wrap_reduced
from volseg.parallel.spatial.operators.planes import AxisPlan, sharded_windows
from volseg.parallel.spatial.operators.pointwise import in_place
from volseg.parallel.spatial.plan.windows import Strided
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, from_whole, wrap


def take_planes(volume: ShardedVolume, dim: int, start: int, count: int, step: int = 1) -> ShardedVolume | Tensor:
    """Return ``count`` planes from ``start`` on, every ``step``-th; along the cut the slabs are rebalanced."""
    dim %= volume.ndim
    if dim not in volume.dims:
        stop = start + (count - 1) * step + 1 if count else start
        index = (slice(None),) * dim + (slice(start, stop, step),)
        return wrap(volume, [slab[index] for slab in volume.slabs])
    if (start, count, step) == (0, volume.shape[dim], 1):
        return volume
    plans = [
        AxisPlan(Strided(start, step), count) if cut == dim else AxisPlan(Strided(), size)
        for cut, size in zip(volume.dims, volume.sizes, strict=True)
    ]

    def every(tensor: Tensor) -> Tensor:
        index = (slice(None),) * dim + (slice(None, None, step),)
        return tensor[index]

    def whole(tensor: Tensor) -> Tensor:
        return every(tensor.narrow(dim, start, (count - 1) * step + 1 if count else 0))

    return sharded_windows(volume, plans, lambda slab, *_: every(slab), whole)


def sliced(volume: ShardedVolume, entries: Sequence[Any]) -> ShardedVolume | Tensor:
    """Index with integers, slices and None, along cut dims too."""
    # Slice all uncut dims first, in one step: planes that change shards are then smaller.
    given = [place for place, entry in enumerate(entries) if entry is not None]
    ranges = {place for dim, place in enumerate(given) if isinstance(entries[place], slice) and dim not in volume.dims}
    index = tuple(entries[place] if place in ranges else slice(None) for place in given)
    dim = 0
    result: ShardedVolume | Tensor = volume
    if any(part != slice(None) for part in index):
        result = wrap(volume, [slab[index] for slab in volume.slabs])
        entries = [slice(None) if place in ranges else entry for place, entry in enumerate(entries)]
    for entry in entries:
        if not isinstance(result, ShardedVolume):  # now too thin to be cut
            result = result[(slice(None),) * dim + (entry,)]
            dim += not isinstance(entry, int)
            continue
        if isinstance(entry, slice):
            result = _take_range(result, dim, entry)
        elif entry is None:
            result = permute(torch.unsqueeze, (result, dim), {})
        else:
            result = _select(result, dim, entry)
            continue
        dim += 1
    return result


def _take_range(volume: ShardedVolume, dim: int, entry: slice) -> ShardedVolume | Tensor:
    start, stop, step = entry.indices(volume.shape[dim])
    if step < 1:
        raise ValueError("step must be greater than zero")
    count = max(0, -(-(stop - start) // step))
    return volume if entry == slice(None) else take_planes(volume, dim, start, count, step)


def is_basic(entry: Any) -> bool:
    """Return whether an index is an integer, a slice, None or an ellipsis."""
    return entry is None or entry is ... or (isinstance(entry, int | slice) and not isinstance(entry, bool))


def expanded(index: tuple, ndim: int) -> list[Any]:
    """Replace the ellipsis by full slices."""
    used = sum(entry is not None and entry is not ... for entry in index)
    rest = [slice(None)] * (ndim - used)
    if ... in index:
        where = index.index(...)
        return [*index[:where], *rest, *index[where + 1 :]]
    return [*index, *rest]


def _select(volume: ShardedVolume, dim: int, index: int) -> ShardedVolume | Tensor:
    size = volume.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    if dim in volume.dims:  # one plane is whole: every shard holds it
        one = take_planes(volume, dim, index % size, 1)
        one = one.full_tensor() if isinstance(one, ShardedVolume) else one
        return one.squeeze(dim)
    return wrap_reduced(volume, [slab.select(dim, index) for slab in volume.slabs], [dim])


@handles("Slices and joins", "narrow", merged=True)
def narrow(func: Callable, input: Any, dim: int, start: Any, length: int) -> Any:
    """Take a range of planes."""
    dim %= input.ndim
    first = int(start)
    return take_planes(input, dim, first + input.shape[dim] if first < 0 else first, length)


@handles("Slices and joins", "select", merged=True)
def select(func: Callable, input: Any, dim: int, index: int) -> Any:
    """Take one plane."""
    return _select(input, dim % input.ndim, index)


@handles("Slices and joins", "unbind", "Tensor.__iter__", merged=True)
def unbind(func: Callable, input: Any, dim: int = 0) -> Any:
    """Take the planes one by one."""
    return tuple(_select(input, dim % input.ndim, index) for index in range(input.shape[dim]))


SPLITS = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


@handles("Slices and joins", "split", "chunk", "tensor_split", "split_with_sizes", *SPLITS, rehearse=False, merged=True)
def split(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Split along an uncut dim, or along the cut into balanced volumes."""
    named = bind(func, args, kwargs)
    volume = named.pop("input")
    dim = SPLITS.get(func.__name__, named.pop("dim", 0)) % volume.ndim
    if any(isinstance(value, Tensor) for value in named.values()):
        refuse("the places of the split must be numbers, not a tensor")
    # A meta tensor gives the sizes of the parts by torch's own rules.
    outline = torch.empty(volume.shape, device="meta")
    (how,) = named.values()
    parts = func(outline, how) if func.__name__ in SPLITS else func(outline, how, dim=dim)
    result, start = [], 0
    for part in parts:
        result.append(take_planes(volume, dim, start, part.shape[dim]))
        start += part.shape[dim]
    return tuple(result)


@handles("Slices and joins", "cat", "concat", "concatenate", merged=True, rounded=True)
def cat(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Join along uncut dims slab by slab; along the cut, join the gathered volumes."""
    # torch ignores an empty tensor of one dim, whatever dims the others have.
    parts = [part for part in tensors if part.shape != (0,)]
    like = volumes(parts)[0]
    dim %= like.ndim
    if dim in like.dims:
        say_gathered(like, "joins planes to")
        return from_whole(torch.cat(list(map(whole_of, parts)), dim), like.dims, like.context)
    joined = [cut_like(part, like) for part in parts]
    if dim == 1 and like.ndim == 5 and like.merged is None and like.context.communicator.is_direct:
        itemsize = max(part.dtype.itemsize for part in joined)
        tiles = count_slab_tiles(like, sum(part.shape[1] for part in joined), itemsize)
        return join_channels(joined, later=tiles > 1)
    slabs = [torch.cat(column, dim) for column in zip(*(part.slabs for part in joined), strict=True)]
    return wrap(like, slabs)


@handles("Slices and joins", "stack", merged=True)
def stack(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Stack volumes along a new dim."""
    like = volumes(tensors)[0]
    dim %= like.ndim + 1
    parts = [cut_like(part, like) for part in tensors]
    slabs = [torch.stack(column, dim) for column in zip(*(part.slabs for part in parts), strict=True)]
    return wrap(like, slabs, [cut + (dim <= cut) for cut in like.dims])


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@handles("Slices and joins", "Tensor.__getitem__", merged=True)
def getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Index with integers, slices, None and an ellipsis, along cut dims too; otherwise index the gathered volume."""
    volume, index = args
    index = _as_tuple(index)
    if isinstance(volume, ShardedVolume) and all(map(is_basic, index)):
        return sliced(volume, expanded(index, volume.ndim))
    lists = [entry for entry in index if _is_list_of_integers(entry)]
    if isinstance(volume, ShardedVolume) and len(lists) == 1 and sum(map(_is_full, index)) == len(index) - 1:
        entries = expanded(index, volume.ndim)
        if entries.index(lists[0]) not in volume.dims:  # the channels of a region
            return Copied(wrap(volume, [slab[tuple(entries)] for slab in volume.slabs]))
    return Copied(gather(func, (volume, _at_home(index, volume)), {}))


def _as_tuple(index: Any) -> tuple:
    """Return the index as a tuple, with tensors of one integer as integers.

    torch treats a list with a slice, None or an ellipsis as a tuple.
    """
    several = isinstance(index, list) and any(entry is None or isinstance(entry, SLICES) for entry in index)
    entries = tuple(index) if several or isinstance(index, tuple) else (index,)
    return tuple(int(entry) if _is_integer(entry) else entry for entry in entries)


def _is_list_of_integers(entry: Any) -> bool:
    return isinstance(entry, list) and all(type(number) is int for number in entry)


def _is_full(entry: Any) -> bool:
    return entry is ... or (isinstance(entry, slice) and entry == slice(None))


SLICES = (slice, type(...))


def _is_integer(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype in INTEGERS


def _at_home(index: tuple, volume: Tensor) -> tuple:
    """Return an index whose ordinary tensors are on the device of the gathered volume."""
    home = volume.context.communicator.home if isinstance(volume, ShardedVolume) else volume.device
    moves = [isinstance(entry, Tensor) and not isinstance(entry, ShardedVolume) for entry in index]
    return tuple(entry.to(home) if move else entry for entry, move in zip(index, moves, strict=True))


@handles("Slices and joins", "Tensor.__setitem__", merged=True)
def setitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Assign to integers, slices, lists, tensors and masks: slab by slab, or across the cut in the gathered volume."""
    volume, index, value = args
    if not isinstance(volume, ShardedVolume):
        run_gathered(func, args, kwargs)
        return
    index = _as_tuple(index)
    if _is_mask_of_all(volume, index, value):
        rounded = float(torch.tensor(value, dtype=volume.dtype))  # too large for float16: infinite, as torch assigns it
        in_place(Tensor.masked_fill_, (volume, index[0], rounded), {})
        return
    volume.context.change(volume)
    entries = expanded(index, volume.ndim) if all(map(is_basic, index)) else []
    if set(volume.dims) <= {dim for dim, entry in enumerate(entries) if entry == slice(None)} and None not in entries:
        _assign_within(volume, entries, value)
        return
    local = tuple(map(whole_of, _at_home(index, volume)))
    _change_gathered(volume, lambda whole: whole.__setitem__(local, whole_of(value)))


def _is_mask_of_all(volume: ShardedVolume, index: tuple, value: Any) -> bool:
    """Return whether one number is assigned through a mask of the volume's shape."""
    fits = len(index) > 0 and isinstance(value, int | float) and volume.dtype.is_floating_point
    return fits and isinstance(index[0], Tensor) and index[0].dtype == torch.bool and index[0].shape == volume.shape


def _assign_within(volume: ShardedVolume, entries: Sequence[Any], value: Any) -> None:
    """Assign on each slab."""
    values = [value] * len(volume.slabs)
    if isinstance(value, Tensor):
        with torch.no_grad():  # to find the cut dim of the assigned part
            like = sliced(wrap(volume, [slab.detach() for slab in volume.slabs]), entries)
        assert isinstance(like, ShardedVolume)
        values = aligned(value, like)
    for slab, own in zip(volume.slabs, values, strict=True):
        slab[tuple(entries)] = own


FILLS = ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]
INDEXED = ["Tensor.index_add_", "Tensor.index_copy_", "Tensor.index_fill_"]


@handles("Slices and joins", *INDEXED, merged=True)
@handles("Random numbers", *(f"Tensor.{name}" for name in FILLS), rehearse=False, merged=True)
def changed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Change entries along a dim, or draw random voxels, in place: in the gathered volume."""
    volume = args[0]
    refuse_if(not isinstance(volume, ShardedVolume), "it would write a volume into an ordinary tensor")
    volume.context.change(volume)
    given, named = tree_map(whole_of, (args[1:], kwargs))
    _change_gathered(volume, lambda whole: func(whole, *given, **named))
    return volume


def _change_gathered(volume: ShardedVolume, change: Callable[[Tensor], object]) -> None:
    """Change a gathered copy of a volume, and copy its planes back."""
    say_gathered(volume, "assigns to voxels of")
    whole = volume.full_tensor().clone()
    change(whole)
    cut = from_whole(whole, volume.dims, volume.context, volume.merged)
    for slab, changed in zip(volume.slabs, cut.slabs, strict=True):
        slab.copy_(changed)
