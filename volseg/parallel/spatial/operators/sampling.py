"""Sampling at any place of a volume: the places are cut, and each shard reads the whole volume."""

from collections.abc import Callable
from typing import Any

from volseg.parallel.spatial.gathered import run_gathered
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, from_whole

__all__ = ["grid_sample"]


@handles("Interpolation", "F.grid_sample")
def grid_sample(
    func: Callable,
    input: Any,
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    """Sample the gathered input at a slab's places: they may be anywhere in it."""
    settings = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    volume: ShardedVolume = grid if isinstance(grid, ShardedVolume) else input
    context = volume.context
    if isinstance(input, ShardedVolume):
        context.say_once("F.grid_sample may read a volume anywhere: its input is gathered on every device")
    if not isinstance(grid, ShardedVolume):
        # Dim i of the places is dim i + 1 of the result.
        dims = [dim - 1 for dim in input.dims]
        if any(dim < 1 or grid.shape[dim] != size for dim, size in zip(dims, input.sizes, strict=True)):
            return run_gathered(func, (input, grid), settings)
        grid = from_whole(grid, dims, context)
    if any(dim in (0, grid.ndim - 1) for dim in grid.dims):
        refuse("batch and coordinates must not be cut")
    wholes = context.spread(input.full_tensor() if isinstance(input, ShardedVolume) else input)
    slabs = [func(own, places, **settings) for own, places in zip(wholes, grid.slabs, strict=True)]
    shape = [*slabs[0].shape[:2], *grid.shape[1:-1]]
    return ShardedVolume(slabs, [dim + 1 for dim in grid.dims], shape, context)
