"""Functions along a dim that is not cut (channels, mostly), and matrix products on channels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.arguments import bound, dims_of
from volseg.parallel.sharding.operators.pointwise import rewrap, run_local
from volseg.parallel.sharding.table import handles, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["along_dim", "linear"]

POSITION = {"kthvalue": 2, "topk": 2}
"""Where ``dim`` stands among the positional arguments, if not second."""

KEEPING = [
    "softmax",
    "log_softmax",
    "softmin",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "sort",
    "argsort",
    "topk",
    "normalize",
    "glu",
]

REDUCING = ["argmax", "argmin", "kthvalue", "median", "mode", "quantile"]


@handles("Along channels", *KEEPING, *REDUCING, "special.softmax", "special.log_softmax")
def along_dim(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab, where ``dim`` is not cut."""
    name = func.__name__
    where = POSITION.get(name, 2 if name in ("normalize", "quantile") else 1)
    volume = args[0] if args else kwargs.get("input")
    default = 1 if name == "normalize" else (None if name in ("argmax", "argmin", "median", "quantile") else -1)
    dim = kwargs.get("dim", args[where] if len(args) > where else default)
    if not isinstance(volume, ShardedVolume) or dim is None or dim % volume.ndim in volume.dims:
        return unsupported(func, args, kwargs, f"it needs whole lines along dim={dim}")
    results = [func(slab, *args[1:], **_without_input(kwargs)) for slab in volume.slabs]
    first = results[0] if isinstance(results[0], Tensor) else results[0][0]
    if first.ndim == volume.ndim:
        return _wrap_all(volume, results, list(volume.dims))
    gone = dim % volume.ndim
    return _wrap_all(volume, results, [cut - (gone < cut) for cut in volume.dims])


def _without_input(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "self")}


def _wrap_all(volume: ShardedVolume, results: list[Any], dims: list[int]) -> Any:
    if isinstance(results[0], Tensor):
        return wrap(volume, results, dims)
    return type(results[0])([wrap(volume, list(column), dims) for column in zip(*results, strict=True)])


@handles("Along channels", "nn.linear", "F.linear")
def linear(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply a linear layer to the last dim."""
    given = bound("input weight bias", args, kwargs, bias=None)
    volume, weight, bias = given["input"], given["weight"], given["bias"]
    if not isinstance(volume, ShardedVolume) or volume.ndim - 1 in volume.dims:
        return unsupported(func, args, kwargs, "the features (last dim) must not be cut")
    spread = volume.context.spread
    weights = spread(weight)
    biases = [None] * len(weights) if bias is None else spread(bias)
    rows = zip(volume.slabs, weights, biases, strict=True)
    return wrap(volume, [func(slab, w, b) for slab, w, b in rows])


@handles("Along channels", "matmul", "bmm", "Tensor.__matmul__", "Tensor.__rmatmul__")
def matmul(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Multiply matrices where the contracted dim is not cut."""
    if func is Tensor.__rmatmul__:
        return matmul(torch.matmul, (args[1], args[0]), kwargs)
    first, second = args
    sharded = [operand for operand in args if isinstance(operand, ShardedVolume)]
    if any(operand.ndim < 2 for operand in args):
        return unsupported(func, args, kwargs, "vectors are not supported; use an explicit dim")
    like = sharded[0]
    dims = [dim - like.ndim for dim in like.dims]
    if any([d - s.ndim for d in s.dims] != dims or s.sizes != like.sizes for s in sharded):
        return unsupported(func, args, kwargs, "both volumes must be cut alike")
    rows = like is first and all(dim <= -2 for dim in dims)
    columns = like is second and all(dim == -1 or dim < -2 for dim in dims)
    batch = all(dim < -2 for dim in dims)
    if not batch and (len(sharded) > 1 or not (rows or columns)):
        return unsupported(func, args, kwargs, "the contracted dim is cut")
    if batch:
        volume, results = run_local(func, args, kwargs)
        return rewrap(volume, results)
    spread = like.context.spread
    if like is first:
        if second.ndim > 2:
            return unsupported(func, args, kwargs, "a batch of matrices must be cut along the batch")
        results = [func(slab, matrix) for slab, matrix in zip(like.slabs, spread(second), strict=True)]
    else:
        if first.ndim > 2:
            return unsupported(func, args, kwargs, "a batch of matrices must be cut along the batch")
        results = [func(matrix, slab) for slab, matrix in zip(like.slabs, spread(first), strict=True)]
    return wrap(like, results, [results[0].ndim + dim for dim in dims])


@handles("Along channels", "index_select", "gather", "take_along_dim")
def index_select(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pick entries along a dim that is not cut."""
    order = "input indices dim" if func.__name__ == "take_along_dim" else "input dim index"
    given = bound(order, args, kwargs)
    volume, dim = given["input"], given.get("dim")
    index: Any = given.get("index", given.get("indices"))
    if not isinstance(volume, ShardedVolume) or dim is None or dims_of(dim, volume.ndim)[0] in volume.dims:
        return unsupported(func, args, kwargs, "it picks along the cut dim")
    if func.__name__ == "index_select":
        chosen = volume.context.spread(index)
        pairs = zip(volume.slabs, chosen, strict=True)
        return wrap(volume, [torch.index_select(slab, dim, own) for slab, own in pairs])
    like, results = run_local(func, args, kwargs)
    return rewrap(like, results)
