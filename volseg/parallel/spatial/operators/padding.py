"""Padding, mirroring and rolling: each output plane is an input plane or a constant."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.gpus import host_values
from volseg.device.torch_internals import get_storage_key
from volseg.parallel.spatial.operators.planes import (
    AxisPlan,
    LocalWindow,
    get_plane_unit,
    select_planes,
    sharded_windows,
)
from volseg.parallel.spatial.plan.shards import Fetch, spans
from volseg.parallel.spatial.plan.windows import ChosenPlanes, Strided, Window
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap


@handles("Padding and mirroring", "F.pad", "nn.pad", merged=True)
def pad(
    func: Callable, input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardedVolume:
    """Pad within the slabs, and along the cut by planes that are constant or repeat the volume's planes."""
    source, widths = input, list(pad)
    volume = source
    if mode != "constant":  # torch refuses dims with an error that a rehearsal cannot tell from others
        func(torch.empty(input.shape, device="meta"), widths, mode)
    # A single copy pads all dims. Widths of zero get none: torch's repeating modes would compute a gradient.
    if any(widths) and volume.context.communicator.num_shards == 1:
        return _apart(wrap(volume, [func(slab, widths, mode, value) for slab in volume.slabs]), source)
    pairs = [(0, 0)] * (volume.ndim - len(widths) // 2) + list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    inside = [0] * len(widths)
    for place, pair in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        if volume.ndim - 1 - place not in volume.dims:
            inside[2 * place : 2 * place + 2] = pair
    if any(inside):
        # Modes other than constant need a width for each of the last dims: it is zero for cut dims.
        volume = wrap(volume, [F.pad(slab, inside, mode=mode, value=value) for slab in volume.slabs])
    for dim in (dim for dim in volume.dims if pairs[dim] != (0, 0)):
        volume = _pad_cut(volume, dim, pairs[dim], mode, value or 0.0)
    return _apart(volume, source)


def _apart(volume: ShardedVolume, source: ShardedVolume) -> ShardedVolume:
    """Copy slabs that still share the source's memory, as torch does: later code may change them in place."""
    known = {get_storage_key(given.untyped_storage()) for given in source.slabs}
    shared = [get_storage_key(own.untyped_storage()) in known for own in volume.slabs]  # with a slab of any shard
    if not any(shared):
        return volume
    return wrap(volume, [own.clone() if same else own for own, same in zip(volume.slabs, shared, strict=True)])


def _pad_cut(volume: ShardedVolume, dim: int, pair: tuple[int, int], mode: str, value: float) -> ShardedVolume:
    """Pad along a cut dim of a volume on several shards."""
    before, after = pair
    size = volume.shape[dim]
    outputs = size + before + after
    if mode == "constant":
        window: Window = Strided(-before)
    else:
        with host_values():
            numbers = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
            planes = F.pad(numbers, (before, after), mode=mode).flatten().tolist()
            window = ChosenPlanes(tuple(map(int, planes)))
    plans = [
        AxisPlan(window, outputs, value) if cut == dim else AxisPlan(Strided(), planes)
        for cut, planes in zip(volume.dims, volume.sizes, strict=True)
    ]
    axis = volume.dims.index(dim)

    def local(slab: Tensor, windows: list[LocalWindow], _position: int) -> Tensor:
        if not isinstance(window, ChosenPlanes):
            return slab
        own = windows[axis]
        return select_planes(slab, dim, [plane - own.span[0] for plane in window.planes[slice(*own.output)]])

    def refuse_thin(_: Tensor) -> NoReturn:
        refuse("the padded volume is thinner than the number of shards")

    result: ShardedVolume = sharded_windows(volume, plans, local, refuse_thin)
    return result


@handles("Padding and mirroring", "flip", "fliplr", "flipud", merged=True)
def flip(func: Callable, input: Any, dims: int | Sequence[int] | None = None) -> Any:
    """Mirror; along the cut the planes change shards."""
    volume = input
    dims = int(func.__name__ == "fliplr") if dims is None else dims
    dims = [dim % volume.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
    if not set(dims) & set(volume.dims):
        return wrap(volume, [slab.flip(dims) for slab in volume.slabs])
    plans = [
        AxisPlan(Strided(size - 1, -1) if cut in dims else Strided(), size)
        for cut, size in zip(volume.dims, volume.sizes, strict=True)
    ]
    return sharded_windows(volume, plans, lambda slab, *_: slab.flip(dims), lambda tensor: tensor.flip(dims))


@handles("Padding and mirroring", "roll", merged=True)
def roll(func: Callable, input: Any, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Any:
    """Roll along named dims; along the cut each shard fetches the planes that move into it."""
    source = volume = input
    if dims is None or dims == () or dims == []:
        refuse("rolling the flattened volume is not supported: pass dims")
    shifts, dims = ([value] if isinstance(value, int) else list(value) for value in (shifts, dims))
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= volume.ndim
        size = volume.shape[dim]
        if dim not in volume.dims or volume.context.communicator.num_shards == 1:
            volume = wrap(volume, [slab.roll(shift, dim) for slab in volume.slabs])
        elif shift % size:
            volume = wrap(volume, _roll_cut(volume, dim, shift % size))
    return _apart(volume, source)


def _roll_cut(volume: ShardedVolume, dim: int, shift: int) -> list[Tensor]:
    """Return the slabs of a volume rolled along a cut dim; each shard receives only the planes that it lacks."""
    communicator, size, unit = volume.context.communicator, volume.shape[dim], get_plane_unit(volume)
    axis = volume.dims.index(dim)
    wanted = [(start - shift, stop - shift) for start, stop in spans(size, communicator.grid[axis], unit)]
    return communicator.fetch(volume.slabs, Fetch(axis, dim, size, wanted, unit))
