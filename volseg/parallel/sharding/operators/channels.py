"""Functions along a dim that is not cut (channels, mostly), and matrix products on channels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.operators.pointwise import elementwise, rewrap, run_local
from volseg.parallel.sharding.operators.reductions import norm
from volseg.parallel.sharding.signatures import bind
from volseg.parallel.sharding.table import handles, refuse
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["along_dim", "linear", "matmul"]

ALONG_ONE = [
    "softmax",
    "log_softmax",
    "F.softmin",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
    "sort",
    "argsort",
    "msort",
    "topk",
    "glu",
    "argmax",
    "argmin",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "special.softmax",
    "special.log_softmax",
]

LAST = {"sort", "argsort", "topk", "glu", "kthvalue", "mode"}
"""Functions whose ``dim`` is the last one by default; of the others it is all, or must be given."""


@handles("Along channels", *ALONG_ONE)
def along_dim(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab, where ``dim`` is not cut."""
    named = bind(func, args, kwargs)
    volume = named["input"]
    dim = named.get("dim", -1 if func.__name__ in LAST else 0 if func.__name__ == "msort" else None)
    if not isinstance(volume, ShardedVolume) or not isinstance(dim, int) or dim % volume.ndim in volume.dims:
        refuse(f"it needs whole lines along dim={dim}")
    rest = args[1:] if args else ()
    settings = {name: value for name, value in kwargs.items() if value is not volume}
    return _per_slab(volume, [dim], [func(slab, *rest, **settings) for slab in volume.slabs])


def _per_slab(volume: ShardedVolume, dims: Sequence[int], results: list[Any]) -> Any:
    """Wrap what each slab gave, of the volume's dims or without ``dims``."""
    first = results[0] if isinstance(results[0], Tensor) else results[0][0]
    if first.ndim == volume.ndim:
        return _wrap_all(volume, results, list(volume.dims))
    gone = [dim % volume.ndim for dim in dims]
    return _wrap_all(volume, results, [cut - sum(dim < cut for dim in gone) for cut in volume.dims])


@handles("Along channels", "quantile", "nanquantile")
def quantile(
    func: Callable, input: Any, q: Any, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
) -> Any:
    """Return quantiles along a dim that is not cut; several of them stand in a new first dim."""
    if not isinstance(input, ShardedVolume) or dim is None or dim % input.ndim in input.dims:
        refuse(f"it needs whole lines along dim={dim}")
    several = isinstance(q, Tensor) and q.ndim == 1
    qs = input.context.spread(q) if isinstance(q, Tensor) else [q] * len(input.slabs)
    pairs = zip(input.slabs, qs, strict=True)
    results = [func(slab, own, dim, keepdim, interpolation=interpolation) for slab, own in pairs]
    dims = [cut - (not keepdim and dim % input.ndim < cut) + several for cut in input.dims]
    return wrap(input, results, dims)


@handles("Along channels", "F.normalize")
def normalize(
    func: Callable, input: Any, p: float = 2.0, dim: int | Sequence[int] = 1, eps: float = 1e-12, out: None = None
) -> Any:
    """Divide by the norm along dims, cut ones too."""
    if not isinstance(input, ShardedVolume):
        refuse("its input is not sharded")
    length = norm(torch.linalg.vector_norm, input, p, dim, keepdim=True)
    return elementwise(torch.div, input, elementwise(torch.clamp_min, length, eps))


def _wrap_all(volume: ShardedVolume, results: list[Any], dims: list[int]) -> Any:
    if isinstance(results[0], Tensor):
        return wrap(volume, results, dims)
    return type(results[0])([wrap(volume, list(column), dims) for column in zip(*results, strict=True)])


@handles("Along channels", "nn.linear", "F.linear")
def linear(func: Callable, input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Apply a linear layer to the last dim."""
    if not isinstance(input, ShardedVolume) or input.ndim - 1 in input.dims or weight.ndim != 2:
        refuse("the features (last dim) must not be cut, and weight must be a matrix")
    spread = input.context.spread
    weights = spread(weight)
    biases = [None] * len(weights) if bias is None else spread(bias)
    rows = zip(input.slabs, weights, biases, strict=True)
    return wrap(input, [func(slab, w, b) for slab, w, b in rows])


@handles("Along channels", "Tensor.__rmatmul__")
def reversed_matmul(func: Callable, input: Any, other: Any) -> Any:
    """Multiply ``other @ input``."""
    return matmul(torch.matmul, other, input)


@handles("Along channels", "matmul", "Tensor.__matmul__", "bmm")
def matmul(func: Callable, input: Any, other: Any = None, mat2: Any = None) -> Any:
    """Multiply matrices where the contracted dim is not cut."""
    first, second = input, mat2 if other is None else other
    sharded = [operand for operand in (first, second) if isinstance(operand, ShardedVolume)]
    if any(operand.ndim < 2 for operand in (first, second)):
        refuse("vectors are not supported; use an explicit dim")
    like = sharded[0]
    dims = [dim - like.ndim for dim in like.dims]
    if any([d - s.ndim for d in s.dims] != dims or s.sizes != like.sizes for s in sharded):
        refuse("both volumes must be cut alike")
    rows = like is first and all(dim <= -2 for dim in dims)
    columns = like is second and all(dim == -1 or dim < -2 for dim in dims)
    batch = all(dim < -2 for dim in dims)
    if not batch and (len(sharded) > 1 or not (rows or columns)):
        refuse("the contracted dim is cut")
    if batch:
        volume, results = run_local(func, (first, second), {})
        return rewrap(volume, results)
    spread = like.context.spread
    if (second if like is first else first).ndim > 2:
        refuse("a batch of matrices must be cut along the batch")
    if like is first:
        results = [func(slab, matrix) for slab, matrix in zip(like.slabs, spread(second), strict=True)]
    else:
        results = [func(matrix, slab) for slab, matrix in zip(like.slabs, spread(first), strict=True)]
    return wrap(like, results, [results[0].ndim + dim for dim in dims])


@handles("Along channels", "index_select")
def index_select(func: Callable, input: Any, dim: int, index: Tensor) -> Any:
    """Pick entries along a dim that is not cut."""
    if not isinstance(input, ShardedVolume) or isinstance(index, ShardedVolume) or dim % input.ndim in input.dims:
        refuse("it picks along the cut dim")
    pairs = zip(input.slabs, input.context.spread(index), strict=True)
    return wrap(input, [torch.index_select(slab, dim, own) for slab, own in pairs])


@handles("Along channels", "gather", "take_along_dim")
def gather(func: Callable, input: Any, index: Any = None, indices: Any = None, dim: int | None = None) -> Any:
    """Pick an entry for each voxel along a dim that is not cut."""
    index = indices if index is None else index
    like = input if isinstance(input, ShardedVolume) else index
    if not isinstance(like, ShardedVolume) or dim is None or dim % like.ndim in like.dims:
        refuse("it picks along the cut dim")
    if any(
        input.shape[cut] != size or index.shape[cut] != size for cut, size in zip(like.dims, like.sizes, strict=True)
    ):
        refuse("input and index must have the same extent along the cut")
    order = (input, index, dim) if func.__name__ == "take_along_dim" else (input, dim, index)
    return rewrap(*run_local(func, order, {}, like=like))
