"""Read and assign voxels by integers, slices, lists, tensors and masks.

Integers, slices, None and an ellipsis index slab by slab, along cut dims too. Lists, tensors and masks index the
gathered volume. Assignments that take only some planes along the cut, and rare changes in place, are made in it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import tree_map
from volseg.parallel.spatial.dispatch import Copied
from volseg.parallel.spatial.gathered import gather, run_gathered, say_gathered, whole_of
from volseg.parallel.spatial.operators.operands import aligned
from volseg.parallel.spatial.operators.pointwise import in_place
from volseg.parallel.spatial.operators.slices import expanded, is_basic, sliced
from volseg.parallel.spatial.table import handles, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, from_whole, wrap

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
    refuse_if(not isinstance(volume, ShardedVolume), "a volume would be written to an ordinary tensor")
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
