"""Read and assign voxels by integers, slices, lists, tensors and masks.

Basic indices apply first, as in torch. Lists, tensors and masks then pick on each slab if they index uncut dims, and
from the gathered volume if they index a cut dim. An assignment that takes only some planes along the cut is made in the
gathered volume.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import tree_map
from volseg.parallel.spatial.dispatch import Copied
from volseg.parallel.spatial.gathered import cut_if_thick, run_gathered, say_gathered, whole_of
from volseg.parallel.spatial.operators.operands import aligned, each_slab
from volseg.parallel.spatial.operators.pointwise import in_place
from volseg.parallel.spatial.operators.slices import expanded, is_basic, sliced
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, from_whole, wrap

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True, slots=True)
class Picks:
    """A tensor of integers or a mask, which indexes dims from ``dim`` on."""

    dim: int
    index: Tensor

    @property
    def dims(self) -> range:
        """The dims that ``index`` picks from."""
        return range(self.dim, self.dim + (self.index.ndim if self.index.dtype == torch.bool else 1))


@handles("Slices and joins", "Tensor.__getitem__", merged=True)
def getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Index with integers, slices, None, an ellipsis, lists, tensors and masks, along cut dims too."""
    volume, index = args
    index = _as_tuple(index)
    if not isinstance(volume, ShardedVolume):
        return Copied(_looked_up(volume, index))
    entries = expanded(_tensors(index, volume), volume.ndim)
    if not any(isinstance(entry, Tensor) for entry in entries):
        return sliced(volume, entries)
    result = sliced(volume, [slice(None) if isinstance(entry, Tensor) else entry for entry in entries])
    return Copied(_picked(result, _picks(entries)))


def _as_tuple(index: Any) -> tuple:
    """Return the index as a tuple; torch treats a list with a slice, None or an ellipsis as a tuple."""
    several = isinstance(index, list) and any(entry is None or isinstance(entry, SLICES) for entry in index)
    return tuple(index) if several or isinstance(index, tuple) else (index,)


SLICES = (slice, type(...))


def _tensors(index: tuple, volume: ShardedVolume) -> tuple:
    """Replace lists by tensors, and scalar tensors by integers."""
    found = []
    for entry in index:
        if isinstance(entry, Sequence) and not isinstance(entry, str):
            entry = torch.tensor(entry).to(volume.context.communicator.home)
            entry = entry.long() if not entry.numel() else entry
        if isinstance(entry, Tensor) and entry.dtype not in (*INTEGERS, torch.bool):
            refuse(f"an index of {entry.dtype} is not supported: use integers, or a mask of bools")
        if not isinstance(entry, Tensor) and not is_basic(entry):
            refuse(f"an index of type {type(entry).__name__} is not supported")
        if isinstance(entry, Tensor) and not entry.ndim and entry.dtype == torch.bool:
            refuse("a single bool is not supported as an index")
        found.append(int(entry) if isinstance(entry, Tensor) and not entry.ndim else entry)
    return tuple(found)


def _picks(entries: Sequence[Any]) -> list[Picks]:
    """Return the picks of tensors and masks; their dims are those after all basic indices were applied."""
    picks, dim = [], 0
    for entry in entries:
        if isinstance(entry, Tensor):
            picks.append(Picks(dim, entry))
            dim = picks[-1].dims.stop
        elif not isinstance(entry, int):
            dim += 1
    return picks


def _full_index(picks: Sequence[Picks], ndim: int, tensors: Sequence[Tensor]) -> tuple:
    """Return an index with these tensors for the picks, and full slices along other dims."""
    index: list[Any] = [slice(None)] * ndim
    for pick, tensor in zip(reversed(picks), reversed(tensors), strict=True):
        index[pick.dims.start : pick.dims.stop] = [tensor]
    return tuple(index)


def _picked(source: ShardedVolume | Tensor, picks: Sequence[Picks]) -> ShardedVolume | Tensor:
    indices = [whole_of(pick.index) for pick in picks]
    if not isinstance(source, ShardedVolume):
        return source[_full_index(picks, source.ndim, [index.to(source.device) for index in indices])]
    taken = [dim for pick in picks for dim in pick.dims]
    context = source.context
    if set(taken) & set(source.dims):
        say_gathered(source, "picks voxels of")
        whole = source.full_tensor()
        whole = whole[_full_index(picks, source.ndim, [index.to(whole.device) for index in indices])]
        # Planes in another order are a volume again; single voxels are not.
        planes = len(picks) == 1 and indices[0].ndim == 1 and indices[0].dtype != torch.bool
        return cut_if_thick(whole, source) if planes else whole
    columns = [context.spread(index) for index in indices]
    slabs = [
        slab[_full_index(picks, source.ndim, row)]
        for slab, row in zip(source.slabs, zip(*columns, strict=True), strict=True)
    ]
    inserted = slabs[0].ndim - (source.ndim - len(taken))
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    # torch puts the picked dims first if other dims are between them.
    first = taken[0] if adjacent else 0
    dims = [cut - sum(dim < cut for dim in taken) for cut in source.dims]
    return wrap(source, slabs, [dim + inserted * (dim >= first) for dim in dims])


def _looked_up(table: Tensor, index: tuple) -> ShardedVolume | Tensor:
    """Index an ordinary tensor: look up each voxel's entry, or select by the gathered index."""
    if len(index) == 1 and isinstance(index[0], ShardedVolume) and index[0].dtype in INTEGERS:
        return each_slab(lambda slab, own: own[slab], index[0], table)
    home = table.device
    return table[tuple(whole_of(i).to(home) if isinstance(i, ShardedVolume) else i for i in index)]


@handles("Slices and joins", "Tensor.__setitem__", merged=True)
def setitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Assign to integers, slices, lists, tensors and masks: slab by slab, or across the cut in the gathered volume."""
    volume, index, value = args
    if not isinstance(volume, ShardedVolume):
        run_gathered(func, args, kwargs)
        return
    index = _as_tuple(index)
    refuse_if(any(entry is None for entry in index), "None is not supported as an index of an assignment")
    if _is_mask_of_all(volume, index, value):
        rounded = float(torch.tensor(value, dtype=volume.dtype))  # too large for float16: infinite, as torch assigns it
        in_place(Tensor.masked_fill_, (volume, index[0], rounded), {})
        return
    volume.context.change(volume)
    entries = expanded(_tensors(index, volume), volume.ndim)
    if _is_local(volume, entries):
        _assign_within(volume, entries, value)
        return
    # Index tensors may be on another device: move them to the volume's home device.
    home = volume.context.communicator.home
    local = tuple(whole_of(i).to(home) if isinstance(i, Tensor) else i for i in entries)
    _change_gathered(volume, lambda whole: whole.__setitem__(local, whole_of(value)))


def _is_mask_of_all(volume: ShardedVolume, index: tuple, value: Any) -> bool:
    """Return whether one number is assigned through a mask of the volume's shape."""
    fits = len(index) > 0 and isinstance(value, int | float) and volume.dtype.is_floating_point
    return fits and isinstance(index[0], Tensor) and index[0].dtype == torch.bool and index[0].shape == volume.shape


def _is_local(volume: ShardedVolume, entries: Sequence[Any]) -> bool:
    """Return whether the index takes all planes along the cut."""
    if any(isinstance(entry, ShardedVolume) for entry in entries):
        return False
    dim, free = 0, []
    for entry in entries:
        if isinstance(entry, slice) and entry == slice(None):
            free.append(dim)
        dim += entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
    return set(volume.dims) <= set(free)


def _assign_within(volume: ShardedVolume, entries: Sequence[Any], value: Any) -> None:
    """Assign on each slab."""
    context = volume.context
    if isinstance(value, Tensor):
        with torch.no_grad():  # to find the cut dim of the assigned part
            bare = wrap(volume, [slab.detach() for slab in volume.slabs])
            part = sliced(bare, [slice(None) if isinstance(entry, Tensor) else entry for entry in entries])
            picks = _picks(entries)
            like = _picked(part, picks) if picks else part
        assert isinstance(like, ShardedVolume)
        values = aligned(value, like)
    else:
        values = [value] * len(volume.slabs)
    columns = [context.spread(entry) if isinstance(entry, Tensor) else [entry] * len(values) for entry in entries]
    for slab, own, *local in zip(volume.slabs, values, *columns, strict=True):
        slab[tuple(local)] = own


@handles("Slices and joins", "index_select", merged=True)
def index_select(func: Callable, input: Any, dim: int, index: Tensor) -> Any:
    """Pick entries along a dim; along the cut, from the gathered volume."""
    if not isinstance(input, ShardedVolume) or isinstance(index, ShardedVolume):
        refuse("the index must be an ordinary tensor, and the input a volume")
    return _picked(input, [Picks(dim % input.ndim, index.reshape(-1))])


@handles("Slices and joins", "Tensor.index_add_", "Tensor.index_copy_", "Tensor.index_fill_", merged=True)
def index_changed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Add to entries along a dim, copy to them or fill them: in the gathered volume."""
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


@handles("Slices and joins", "F.embedding", merged=True)
def embedding(func: Callable, input: Any, weight: Tensor, padding_idx: int | None = None) -> Any:
    """Look up each voxel's row of a table."""
    if not isinstance(input, ShardedVolume) or isinstance(weight, ShardedVolume):
        refuse("the numbers must be a volume, and the table an ordinary tensor")
    return each_slab(func, input, weight, padding_idx)
