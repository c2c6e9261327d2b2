"""Run functions on the whole volume: by ``on_unsupported="gather"``, or because they need all voxels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import SUPPORTED_NODES, get_storage_key, tree_flatten, tree_map
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.copied_view import mark_copies
from volseg.parallel.spatial.plan.shards import can_split
from volseg.parallel.spatial.volume import ShardedVolume, from_whole
from volseg.parallel.state.module import read_version

OF_HISTORY = frozenset({torch.autograd.backward, torch.autograd.grad, Tensor.backward})
"""Functions that a gathered copy cannot serve: it does not belong to results computed from the slabs."""


def volumes(arguments: Any) -> list[ShardedVolume]:
    """Return the sharded volumes in nested arguments."""
    return [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, ShardedVolume)]


def nested(value: Any) -> bool:
    """Return whether a value may hold tensors; ``tree_flatten`` takes many times as long to find none."""
    holds = type(value) in SUPPORTED_NODES or isinstance(value, tuple)
    return holds and (isinstance(value, dict) or set(map(type, value)) != {int})


def name_of(func: Callable) -> str:
    """Return a function's name as a user would write it."""
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func)))
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        return f"Tensor.{owner.__name__}"
    return name.removeprefix("_VariableFunctionsClass.").replace("TensorBase.", "Tensor.")


def unsupported(func: Callable, args: tuple, kwargs: dict[str, Any], reason: str) -> Any:
    """Raise, or run the function on gathered tensors if the user requested that."""
    given = volumes((args, kwargs))
    context = given[0].context
    where = context.module_path()
    if context.on_unsupported != "gather" or func in OF_HISTORY:
        shapes = ", ".join(str(tuple(volume.shape)) for volume in given)
        remedy = (
            "or pass on_unsupported='gather' to ModelParallel to run it on the whole volume, or use strategy='pipeline'"
        )
        if func in OF_HISTORY:
            remedy = (
                "or use retain_grad() and backward(): a gathered copy is not part of the graph that is differentiated"
            )
        raise UnsupportedOperatorError(
            f"{name_of(func)} called from {where} cannot run on a sharded volume (shape {shapes}, cut along dim "
            f"{', '.join(map(str, given[0].dims))}): {reason}. Write it with the functions listed in docs/spatial.md, "
            f"{remedy}"
        )
    context.say_once(
        f"{name_of(func)} called from {where} has no sharded form ({reason}) and runs on the gathered volume"
    )
    return run_gathered(func, args, kwargs)


SMALL = 2**22
"""Number of elements up to which a volume is gathered without a warning: coarse levels are too thin to cut."""


def say_gathered(volume: ShardedVolume, what: str) -> None:
    """Warn once that a large volume is gathered for an operation that slabs cannot do."""
    if volume.shape.numel() > SMALL:
        context = volume.context
        context.say_once(
            f"{context.module_path()} {what} a volume of shape {tuple(volume.shape)} cut along dim "
            f"{', '.join(map(str, volume.dims))}: it is gathered for that"
        )


def gather(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function that needs all voxels on the gathered volumes; warn once about a large one."""
    for volume in volumes((args, kwargs)):
        say_gathered(volume, f"calls {name_of(func)} with")
    return run_gathered(func, args, kwargs)


def whole_of(value: Any) -> Any:
    """Return a volume as an ordinary tensor; leave other values unchanged."""
    return value.full_tensor() if isinstance(value, ShardedVolume) else value


def gather_for(func: Callable, like: ShardedVolume, compute: Callable[[Tensor], Tensor]) -> ShardedVolume | Tensor:
    """Compute a function's result from the gathered volume, and cut the result if every shard gets a plane."""
    say_gathered(like, f"calls {func.__name__} with")
    whole = compute(like.full_tensor())
    grid = zip(like.dims, like.context.communicator.grid, strict=True)
    fits = all(can_split(whole.shape[dim], shards) for dim, shards in grid)
    return from_whole(whole, like.dims, like.context) if fits else whole


def run_gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function on whole tensors, and cut results on the volume's grid again.

    Raises
    ------
    UnsupportedOperatorError
        If the function changes a gathered volume, or returns something other than values: the effect on the copy would
        be lost.
    """
    given = volumes((args, kwargs))
    gathered = {id(volume): volume.full_tensor() for volume in given}
    versions = [read_version(whole) for whole in gathered.values()]
    whole_args, whole_kwargs = tree_map(
        lambda leaf: gathered[id(leaf)] if isinstance(leaf, ShardedVolume) else leaf, (args, kwargs)
    )
    result = func(*whole_args, **whole_kwargs)
    leaves = tree_flatten(result)[0]
    writes_elsewhere = (
        result is None and args and isinstance(args[0], Tensor) and not isinstance(args[0], ShardedVolume)
    )
    if [read_version(whole) for whole in gathered.values()] != versions:
        lost = "changes a volume in place"
    elif func is not Tensor.contiguous and any(leaf is whole for leaf in leaves for whole in gathered.values()):
        lost = "changes a property of the volume"
    elif not writes_elsewhere and not all(isinstance(leaf, Tensor | int | float | complex | str) for leaf in leaves):
        lost = f"returns {type(result).__name__}"
    else:
        memory = {get_storage_key(whole.untyped_storage()) for whole in gathered.values()}
        views = any(isinstance(leaf, Tensor) and get_storage_key(leaf.untyped_storage()) in memory for leaf in leaves)
        # An ordinary tensor that was combined with a volume stays unchanged.
        own = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        result = tree_map(lambda leaf: leaf if id(leaf) in own else _cut_again(leaf, given[0]), result)
        return mark_copies(result, given, perhaps=True) if views else result
    raise UnsupportedOperatorError(
        f"{name_of(func)} called from {given[0].context.module_path()} {lost}, which would be lost on the gathered "
        f"copy. Write it out of place, with the functions listed in docs/spatial.md"
    )


def _cut_again(leaf: Any, like: ShardedVolume) -> Any:
    fits = isinstance(leaf, Tensor) and leaf.ndim == like.ndim
    if fits and all(leaf.shape[dim] == size for dim, size in zip(like.dims, like.sizes, strict=True)):
        return from_whole(leaf, like.dims, like.context)
    return leaf
