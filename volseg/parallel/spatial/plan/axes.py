"""Along which axes of a volume the mesh cuts: by its size alone."""

from collections.abc import Sequence

from volseg.device.layout import DIM
from volseg.errors import ParallelError
from volseg.parallel.spatial.plan.shards import can_split

__all__ = ["AXES", "THICK", "check_axes", "choose_dims"]

AXES = {"D": -3, "H": -2, "W": -1}

THICK = 16
"""Planes per shard from which on a volume is cut along D even where H or W is longer. Only halos along D are received
in place: a step of 128 x 256 x 256 voxels on two GPUs took 68 ms cut along H, where 64 x 256 x 256 take 25 on one."""


def check_axes(axes: Sequence[str] | None, grid: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the axes that are to be cut, one per axis of the grid; None where each volume's size decides.

    Raises
    ------
    ParallelError
        If they are not as many different ones of D, H, W.
    """
    if axes is None:
        return None
    chosen = tuple(axes)
    if len(chosen) != len(grid) or len(set(chosen)) != len(chosen) or not set(chosen) <= set(AXES):
        raise ParallelError(
            f"axes must name {len(grid)} different ones of D, H, W (one per axis of grid {grid}), got {axes!r}"
        )
    return chosen


def choose_dims(shape: Sequence[int], axes: Sequence[str] | None, grid: Sequence[int]) -> list[int] | None:
    """Return the dim that each mesh axis cuts, or None for a volume too thin to cut."""
    if axes is not None:
        dims = [len(shape) + AXES[axis] for axis in axes]
    else:
        # The longest dim has the thinnest halo for its slab; of equal ones the first, whose slabs are contiguous.
        spatial = sorted(range(2, len(shape)), key=lambda dim: -shape[dim])
        dims = sorted(spatial[: len(grid)])
        if len(grid) == 1 and len(shape) == 5 and shape[DIM] >= THICK * grid[0]:
            dims = [DIM]
    if all(can_split(shape[dim], count) for dim, count in zip(dims, grid, strict=True)):
        return dims
    return None
