"""Functions of all voxels whose result is no volume (they are gathered for it), and of voxels and a plain tensor."""

from collections.abc import Callable
from typing import Any

from volseg.parallel.spatial.gathered import run_gathered
from volseg.parallel.spatial.operators.operands import each_slab
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["bucketize", "gathered", "is_in", "search_sorted"]


@handles(
    "Counts", "argwhere", "bincount", "histc", "nonzero", "unique", "unique_consecutive", rehearse=False, merged=True
)
def gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return positions, counts or values of voxels: an ordinary tensor, of the gathered volume."""
    return run_gathered(func, args, kwargs)


@handles("Counts", "bucketize", merged=True)
def bucketize(func: Callable, input: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Return the number of each voxel's interval between boundaries, an ordinary tensor."""
    if isinstance(boundaries, ShardedVolume):
        refuse("the boundaries must be an ordinary tensor")
    settings = {"out_int32": out_int32, "right": right}
    return each_slab(lambda slab, own: func(slab.contiguous(), own, **settings), input, boundaries)


@handles("Counts", "searchsorted", merged=True)
def search_sorted(
    func: Callable,
    sorted_sequence: Any,
    input: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
) -> Any:
    """Return the number of each voxel's interval in one sorted sequence for all of them."""
    if isinstance(sorted_sequence, ShardedVolume) or sorted_sequence.ndim != 1:
        refuse("it needs one ordinary sequence for all voxels")
    settings = {"out_int32": out_int32, "right": right, "side": side}
    return each_slab(lambda slab, own: func(own, slab.contiguous(), **settings), input, sorted_sequence)


@handles("Counts", "isin", merged=True)
def is_in(func: Callable, elements: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    """Say of each voxel whether it is one of some numbers, or of each number whether a voxel has it."""
    settings: dict[str, Any] = {"assume_unique": assume_unique, "invert": invert}
    voxels, numbers = elements, test_elements
    if isinstance(numbers, ShardedVolume):
        return run_gathered(func, (voxels, numbers), settings)
    return each_slab(func, voxels, numbers, **settings)
