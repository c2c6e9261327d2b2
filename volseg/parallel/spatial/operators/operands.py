"""Bring arguments to the form that handlers use, and run functions slab by slab.

All operands are brought to one cut, the function runs on each slab's row of operands, and its results are wrapped.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from volseg.device.torch_internals import find_transform, is_forward_mode, tree_flatten, tree_unflatten
from volseg.parallel.spatial.context import Context, saved_tensors_hooks
from volseg.parallel.spatial.gathered import nested, volumes
from volseg.parallel.spatial.table import refuse
from volseg.parallel.spatial.volume import ShardedVolume, from_whole, give_whole, relaid, wrap

LARGE = 2**22
"""Smallest number of elements of a difference whose rows are computed by the shards that own them."""

GROWTH = 16
"""Smallest ratio of the elements of such a difference to those of each operand."""

DIFFERENCES = frozenset({torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__})


class OwnRows(TorchFunctionMode):
    """Computes large differences of small ordinary tensors as volumes that are cut along their rows.

    A network computes the masks of its shifted windows in this way, ``(windows, 1, N)`` minus ``(windows, N, 1)``, and
    each shard adds the masks of its own windows. As ordinary tensors, every shard would compute all masks, in tensors
    as large as the attention scores. A difference becomes a volume if the network has cut a large tensor of as many
    rows before, and no block is being recorded that the network itself checkpoints: it is recomputed outside of this
    mode, and must not change.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        context = self._context
        if func in DIFFERENCES and context.large_rows and not kwargs and _are_small_operands(args, context):
            outline = func(*(torch.empty_like(given, device="meta") for given in args))
            if outline.numel() >= max(LARGE, GROWTH * max(given.numel() for given in args)):
                merged = context.large_rows[args[0].shape[0]]
                rows = zip(*(from_whole(given, [0], context, merged).slabs for given in args), strict=True)
                return ShardedVolume([func(*row) for row in rows], [0], outline.shape, context, merged)
        return func(*args, **(kwargs or {}))


def _are_small_operands(args: tuple, context: Context) -> bool:
    """Return whether both arguments are ordinary tensors with known rows, and nothing observes the computation."""
    if torch.is_inference_mode_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if find_transform() is not None or is_forward_mode() or saved_tensors_hooks() is not context.hooks:
        return False
    if len(args) != 2 or any(type(given) is not Tensor or given.layout != torch.strided for given in args):
        return False
    first, second = args
    rows = first.shape[0] if first.ndim == second.ndim >= 2 else None
    if rows not in context.large_rows or second.shape[0] != rows:
        return False
    home = context.communicator.home
    return not any(given.requires_grad or given.is_inference() or given.device != home for given in args)


def per_dim(value: int | float | Sequence, count: int) -> list:
    """Return one value per spatial dim; torch allows a single value for all."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * count if len(values) == 1 else values


def dims_of(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Return non-negative dims; ``None`` and an empty sequence mean all of them."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(ndim))
    return [d % ndim for d in (dim if isinstance(dim, Sequence) else [dim])]


def spatial_only(volume: Any, count: int) -> bool:
    """Return whether only the last ``count`` dims of the volume are cut."""
    return isinstance(volume, ShardedVolume) and all(dim >= volume.ndim - count for dim in volume.dims)


def aligned(operand: Any, like: ShardedVolume) -> list[Any]:
    """Return an operand of a broadcast as one value per slab of ``like``."""
    if operand is like:
        return list(like.slabs)
    if not isinstance(operand, Tensor):
        return [operand] * len(like.context.communicator.devices)
    context, pairs = like.context, zip(_dims_from_last(operand, like), like.sizes, strict=True)
    dims = [dim if dim >= 0 and operand.shape[dim] == size else -1 for dim, size in pairs]
    several = len(dims) == 1 and dims[0] >= 0 and context.communicator.num_shards > 1
    if several and operand.numel() >= LARGE and not isinstance(operand, ShardedVolume) and not operand.requires_grad:
        context.large_rows[like.sizes[0]] = like.merged
    return place(operand, dims, like)


def _dims_from_last(operand: Tensor, like: ShardedVolume) -> list[int]:
    """Return the operand's dims at the cut dims of a volume, counted from the last as in broadcasting."""
    return [dim + operand.ndim - like.ndim for dim in like.dims]


def place(operand: Tensor, dims: Sequence[int], like: ShardedVolume) -> list[Tensor]:
    """Return an operand for each slab of ``like``.

    Parameters
    ----------
    operand
        A volume or an ordinary tensor.
    dims
        The operand's dim for each cut dim of ``like``, of the same size; -1 if it has none. Each slab gets the whole
        operand along the other dims.
    """
    context = like.context
    if isinstance(operand, ShardedVolume):
        if _has_same_slabs(operand, dims, like):
            return list(relaid(operand, like.merged).slabs)
        if set(dims) == {-1} and operand.context is context:
            return give_whole(operand)
        operand = operand.full_tensor()
    if -1 not in dims:
        return from_whole(operand, dims, context, like.merged).slabs
    copies = context.spread(operand)
    for axis, dim in enumerate(dims):
        if dim >= 0:  # cut along only one axis of the grid
            pairs = zip(copies, like.owned(), strict=True)
            copies = [copy.narrow(dim, own[axis][0], own[axis][1] - own[axis][0]) for copy, own in pairs]
    return copies


def _has_same_slabs(operand: ShardedVolume, dims: Sequence[int], like: ShardedVolume) -> bool:
    """Return whether the shards own the same planes of both volumes; two models may divide a volume differently."""
    own, other = operand.context.communicator, like.context.communicator
    same_dims = list(operand.dims) == dims and operand.sizes == like.sizes
    return same_dims and (own is other or own.owned(like.sizes) == other.owned(like.sizes))


def run_local(
    func: Callable, args: tuple, kwargs: dict[str, Any], like: ShardedVolume | None = None
) -> tuple[ShardedVolume, list[Any]]:
    """Run ``func`` on each slab with operands cut like ``like``; return ``like`` and the results.

    By default ``like`` is the volume with the most dims, as many as the result has.
    """
    leaves = [*args, *kwargs.values()]
    if not any(map(nested, leaves)):

        def call(row: Sequence[Any]) -> Any:
            return func(*row[: len(args)], **dict(zip(kwargs, row[len(args) :], strict=True)))
    else:
        leaves, structure = tree_flatten((args, kwargs))

        def call(row: Sequence[Any]) -> Any:
            local_args, local_kwargs = tree_unflatten(list(row), structure)
            return func(*local_args, **local_kwargs)

    if like is None:
        given = [leaf for leaf in leaves if isinstance(leaf, ShardedVolume)]
        # No volume has extent one along a dim that another volume cuts: it would be an ordinary tensor.
        like = given[0] if len(given) == 1 else max(given, key=lambda volume: volume.ndim)
    columns = [aligned(leaf, like) for leaf in leaves]
    results = [call(row) for row in zip(*columns, strict=True)]
    return like, results


def rewrap(like: ShardedVolume, results: list[Any]) -> Any:
    """Return per-slab results (tensors, or tuples of them) as volumes."""
    if isinstance(results[0], Tensor):
        shift = results[0].ndim - like.ndim
        return wrap(like, results, [dim + shift for dim in like.dims])
    if isinstance(results[0], tuple | list):
        parts = [rewrap(like, list(column)) for column in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(parts)
    return results[0]


def elementwise(function: Callable, *operands: Any, **settings: Any) -> Any:
    """Call a pointwise function on volumes from within a handler."""
    if not volumes((operands, settings)):
        return function(*operands, **settings)
    like, results = run_local(function, operands, settings)
    return rewrap(like, results)


def each_slab(func: Callable, input: ShardedVolume, *operands: Any, **settings: Any) -> Any:
    """Call a function with each slab, or slab of samples, and a copy of each ordinary tensor; return volumes."""
    slabs = input.slabs

    def give(own: Any) -> list[Any]:
        return input.context.spread(own) if isinstance(own, Tensor) else [own] * len(slabs)

    columns = [give(own) for own in operands]
    named = {name: give(own) for name, own in settings.items()}
    rows = enumerate(zip(slabs, *columns, strict=True))
    return rewrap(
        input, [func(*row, **{name: column[number] for name, column in named.items()}) for number, row in rows]
    )


def wrap_reduced(
    volume: ShardedVolume, slabs: Sequence[Tensor], gone: Collection[int], keepdim: bool = False
) -> ShardedVolume:
    """Return a volume of slabs that lack the uncut dims ``gone``, or keep them with ``keepdim``."""
    dims = volume.dims if keepdim else [cut - sum(dim < cut for dim in gone) for cut in volume.dims]
    return wrap(volume, slabs, dims)


def cut_like(operand: Tensor, like: ShardedVolume) -> ShardedVolume:
    """Return a volume or an ordinary tensor of the same grid, cut like ``like`` (dims count from the last)."""
    dims = _dims_from_last(operand, like)
    if isinstance(operand, ShardedVolume):
        if _has_same_slabs(operand, dims, like):
            return relaid(operand, like.merged)
        operand = operand.full_tensor()
    if any(dim < 0 or operand.shape[dim] != size for dim, size in zip(dims, like.sizes, strict=True)):
        refuse(f"an ordinary tensor of shape {tuple(operand.shape)} does not have the planes of the cut volume")
    return from_whole(operand, dims, like.context, like.merged)
