"""Reductions over any dims, and other functions along a dim, mostly the channels.

Sums, means, variances, norms and extremes without a gradient combine the slabs' results. Over a cut dim they return an
ordinary tensor, bit-identical on every shard. Other functions along a cut dim run on the gathered volume.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.gathered import gather
from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.lazy.scores import soften
from volseg.parallel.spatial.operators.operands import dims_of, elementwise, rewrap, run_local, wrap_reduced
from volseg.parallel.spatial.operators.pointwise import pointwise
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap

HALF = (torch.float16, torch.bfloat16)


def over_dims(
    kind: str, volume: ShardedVolume, dims: Sequence[int], keepdim: bool = False, **settings: Any
) -> ShardedVolume | Tensor:
    """Reduce with ``sum``, ``mean``, ``amax``, ``amin``, ``any`` or ``all``."""
    if kind == "mean":
        count = prod(volume.shape[dim] for dim in dims)
        dtype = settings.pop("dtype", None) or volume.dtype
        wide = torch.float32 if dtype in HALF else dtype
        total = over_dims("sum", volume, dims, keepdim, dtype=wide)
        return elementwise(lambda own: (own / count).to(dtype), total)

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        tensor = getattr(torch, kind)(tensor, dim=list(over), keepdim=True, **settings)
        return tensor if keep else _squeeze(tensor, over)

    return reduce_slabs(volume, dims, keepdim, function)


def reduce_slabs(
    volume: ShardedVolume, dims: Sequence[int], keepdim: bool, function: Callable[[Tensor, Sequence[int], bool], Tensor]
) -> ShardedVolume | Tensor:
    """Reduce each slab with ``function(tensor, dims, keepdim)``, then the slabs' results with the same function."""
    cut = [dim for dim in volume.dims if dim in dims]
    if not cut:
        return wrap_reduced(volume, [function(slab, dims, keepdim) for slab in volume.slabs], dims, keepdim)
    partials = [function(slab, dims, True) for slab in volume.slabs]
    whole = stacked(volume, partials, dims)
    reduced = function(whole, cut, True)
    return reduced if keepdim else _squeeze(reduced, dims)


def stacked(volume: ShardedVolume, partials: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Gather partial results, of extent one along the reduced cut dims, into a tensor with one plane per shard."""
    communicator = volume.context.communicator
    if len(communicator.grid) == 1:
        (dim,) = volume.dims
        return communicator.collect(partials).movedim(0, dim).squeeze(dim + 1)
    sizes = [
        count if dim in dims else volume.shape[dim] for dim, count in zip(volume.dims, communicator.grid, strict=True)
    ]
    return communicator.gather(partials, volume.dims, sizes)


def _squeeze(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Remove uncut dims of extent one."""
    for dim in sorted(dims, reverse=True):
        tensor = tensor.squeeze(dim)
    return tensor


@handles("Reductions", "sum", "mean", "any", "all", "amax", "amin", merged=True)
def reduce(func: Callable, input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Reduce over dims."""
    dims, kind, back = dims_of(dim, input.ndim), func.__name__, None
    if kind in ("amax", "amin"):
        return extremes(kind, input, dims, keepdim)
    if dtype is None and kind == "sum" and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.int64
    if kind == "sum" and input.dtype in HALF and dtype is None:
        # Partial sums are added in float32 and rounded once, as on one device.
        dtype = torch.float32
        back = None if torch.is_autocast_enabled("cuda") and input.is_cuda else input.dtype
    result = over_dims(kind, input, dims, keepdim, **({} if dtype is None else {"dtype": dtype}))
    return result if back is None else elementwise(Tensor.to, result, back)


def extremes(kind: str, volume: ShardedVolume, dims: Sequence[int], keepdim: bool = False) -> ShardedVolume | Tensor:
    """Return ``amax`` or ``amin`` over dims; with a gradient, which equal voxels share, of the gathered volume."""
    if volume.requires_grad and torch.is_grad_enabled() and set(volume.dims) & set(dims):
        found: ShardedVolume | Tensor = gather(getattr(torch, kind), (volume, list(dims), keepdim), {})
        return found
    return over_dims(kind, volume, dims, keepdim)


@handles("Reductions", "var", "std", "var_mean", "std_mean", merged=True)
def variance(
    func: Callable,
    input: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: float | None = None,
) -> Any:
    """Combine the slabs' means and variances."""
    refuse_if(input.is_complex(), "the variance of complex volumes is not supported")
    volume, dims = input, dims_of(dim, input.ndim)
    spread: Any
    center: Any
    correction = int(unbiased) if correction is None else correction
    if not set(dims) & set(volume.dims):
        pairs = [torch.var_mean(slab, dims, correction=correction, keepdim=keepdim) for slab in volume.slabs]
        spread, center = (wrap_reduced(volume, column, dims, keepdim) for column in zip(*pairs, strict=True))
    else:
        wide = wrap(volume, [slab.float() if volume.dtype in HALF else slab for slab in volume.slabs])
        center = over_dims("mean", wide, dims, keepdim=True)
        squares = elementwise(torch.square, elementwise(torch.sub, wide, center))
        count = prod(volume.shape[dim] for dim in dims) - correction
        spread = (over_dims("sum", squares, dims, keepdim=True) / max(count, 0)).to(volume.dtype)
        center = center.to(volume.dtype)
        if not keepdim:
            spread, center = _squeeze(spread, dims), _squeeze(center, dims)
    spread = elementwise(_root, spread) if "std" in func.__name__ else spread
    return (spread, center) if "mean" in func.__name__ else spread


def _root(variance: Tensor) -> Tensor:
    """Return the standard deviation; where it is zero, its gradient is zero too, as in torch."""
    zero = variance == 0
    return variance.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


@handles("Reductions", "torch.norm", "Tensor.norm", "linalg.vector_norm", merged=True)
def norm(func: Callable, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, ord: Any = None) -> Any:
    """Return a vector norm over dims."""
    order = p if ord is None else ord
    if not (order in ("fro", None) or isinstance(order, int | float)):
        refuse(f"p={order!r} is not a vector norm")
    order = 2.0 if order in ("fro", None) else float(order)
    dims = dims_of(dim, input.ndim)
    if order in (0, inf, -inf) and set(dims) & set(input.dims):
        return gather(torch.linalg.vector_norm, (input, order, dims, keepdim), {})

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        return torch.linalg.vector_norm(tensor, order, list(over), keep)

    return reduce_slabs(input, dims, keepdim, function)


ALONG = ["softmax", "log_softmax", "special.softmax", "special.log_softmax", "glu"]
ALONG += ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"]
ALONG += ["sort", "argsort", "msort", "topk", "argmax", "argmin", "kthvalue", "median", "nanmedian", "mode"]

REDUCING = ["aminmax", "count_nonzero", "logsumexp", "special.logsumexp", "nanmean", "nansum", "prod"]

LAST = {"sort", "argsort", "topk", "glu", "kthvalue", "mode"}
"""Functions whose ``dim`` is the last dim by default; that of ``msort`` is the first one, others take all dims."""


@handles("Along channels", *ALONG, merged=True)
@handles("Reductions", *REDUCING, merged=True)
def along_dim(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab along uncut dims, otherwise on the gathered volume."""
    named = bind(func, args, kwargs)
    volume, name = named["input"], func.__name__
    dims = named.get("dim", -1 if name in LAST else 0 if name == "msort" else None)
    own = dims_of(dims, volume.ndim)
    if not isinstance(volume, ShardedVolume) or set(own) & set(volume.dims):
        return gather(func, args, kwargs)
    if waits(volume) and name == "softmax" and own == [volume.ndim - 1]:
        dtype = named.get("dtype")
        later = soften(lambda slab: torch.softmax(slab, -1, dtype=dtype), volume, dtype)
        if later is not None:
            return later
    rest = args[1:] if args else ()
    settings = {name: value for name, value in kwargs.items() if value is not volume}
    return _per_slab(volume, own, [func(slab, *rest, **settings) for slab in volume.slabs])


@handles("Reductions", "max", "min", merged=True)
def extremum(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the extremum of all voxels, of one uncut dim with indices, or of two tensors voxel by voxel."""
    named = bind(func, args, kwargs)
    if "other" in named:
        larger = torch.maximum if func.__name__ == "max" else torch.minimum
        return pointwise(larger, (named["input"], named["other"]), {})
    if "dim" not in named:
        kind = "amax" if func.__name__ == "max" else "amin"
        return extremes(kind, named["input"], list(range(named["input"].ndim)))
    return along_dim(func, args, kwargs)


def _per_slab(volume: ShardedVolume, dims: Sequence[int], results: Sequence[Any]) -> Any:
    """Wrap the slabs' results, tensors or tuples of tensors, with all of the volume's dims or without ``dims``."""
    if isinstance(results[0], Tensor):
        return wrap_reduced(volume, results, dims, keepdim=results[0].ndim == volume.ndim)
    return type(results[0])([_per_slab(volume, dims, column) for column in zip(*results, strict=True)])


@handles("Along channels", "gather", "take_along_dim", merged=True)
def pick_along(func: Callable, input: Any, index: Any, dim: int | None = None) -> Any:
    """Pick an entry for each voxel along an uncut dim."""
    like = input if isinstance(input, ShardedVolume) else index
    if not isinstance(like, ShardedVolume) or dim is None or dim % like.ndim in like.dims:
        refuse("it picks along the cut dim")
    if any(
        input.shape[cut] != size or index.shape[cut] != size for cut, size in zip(like.dims, like.sizes, strict=True)
    ):
        refuse("input and index must have the same extent along the cut")
    order = (input, index, dim) if func.__name__ == "take_along_dim" else (input, dim, index)
    return rewrap(*run_local(func, order, {}, like=like))
