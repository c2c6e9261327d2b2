"""Reductions over any dims. Over a cut dim they give an ordinary tensor, the same on every shard, bit for bit."""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.sharding.layout import spans
from volseg.parallel.sharding.operators.arguments import bound, dims_of
from volseg.parallel.sharding.table import handles, run_gathered, unsupported
from volseg.parallel.sharding.volume import ShardedVolume, wrap

__all__ = ["moments", "over_dims", "reduce_slabs"]

HALF = (torch.float16, torch.bfloat16)


def over_dims(
    kind: str, volume: ShardedVolume, dims: Sequence[int], keepdim: bool = False, **settings: Any
) -> ShardedVolume | Tensor:
    """Reduce with a function that may be applied again to its own results (sum, amax, ...), or with ``mean``."""
    if kind == "mean":
        count = prod(volume.shape[dim] for dim in dims)
        dtype = settings.pop("dtype", None) or volume.dtype
        wide = torch.float32 if dtype in HALF else dtype
        total = over_dims("sum", volume, dims, keepdim, dtype=wide)
        if isinstance(total, ShardedVolume):
            return wrap(total, [(slab / count).to(dtype) for slab in total.slabs])
        return (total / count).to(dtype)

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        if kind == "prod":  # takes one dim at a time
            for dim in over:
                tensor = tensor.prod(dim, keepdim=True, **settings)
        else:
            tensor = getattr(torch, kind)(tensor, dim=list(over), keepdim=True, **settings)
        return tensor if keep else _squeeze(tensor, over)

    return reduce_slabs(volume, dims, keepdim, function)


def reduce_slabs(
    volume: ShardedVolume,
    dims: Sequence[int],
    keepdim: bool,
    function: Callable[[Tensor, Sequence[int], bool], Tensor],
) -> ShardedVolume | Tensor:
    """Reduce each slab with ``function(tensor, dims, keepdim)``, then the slabs' results with the same function."""
    cut = [dim for dim in volume.dims if dim in dims]
    if not cut:
        slabs = [function(slab, dims, keepdim) for slab in volume.slabs]
        return wrap(volume, slabs, volume.dims if keepdim else [_shifted(dim, dims) for dim in volume.dims])
    partials = [function(slab, dims, True) for slab in volume.slabs]
    whole = stacked(volume, partials, dims)
    reduced = function(whole, cut, True)
    return reduced if keepdim else _squeeze(reduced, dims)


def stacked(volume: ShardedVolume, partials: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Gather results of extent one along the reduced cut dims; there, the whole tensor has one plane per shard."""
    communicator = volume.context.communicator
    if len(communicator.grid) == 1:
        (dim,) = volume.dims
        return communicator.collect(partials).movedim(0, dim).squeeze(dim + 1)
    sizes = [
        count if dim in dims else volume.shape[dim] for dim, count in zip(volume.dims, communicator.grid, strict=True)
    ]
    return communicator.gather(partials, volume.dims, sizes)


def _squeeze(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        tensor = tensor.squeeze(dim)
    return tensor


def _shifted(dim: int, removed: Sequence[int]) -> int:
    return dim - sum(other < dim for other in removed)


@handles("Reductions", "sum", "mean", "amax", "amin", "logsumexp", "nansum", "special.logsumexp")
def reduce(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reduce over dims."""
    given = bound("input dim keepdim", args, kwargs, dim=None, keepdim=False)
    volume = given.pop("input")
    dims, keepdim = dims_of(given.pop("dim"), volume.ndim), given.pop("keepdim")
    settings = {key: value for key, value in given.items() if value is not None}
    kind, back = func.__name__, None
    if kind == "sum" and volume.dtype in HALF and settings.get("dtype") is None:
        # Sums of sums: rounded once, at the end, as on one device.
        settings["dtype"] = torch.float32
        back = None if torch.is_autocast_enabled("cuda") and volume.is_cuda else volume.dtype
    result = over_dims(kind, volume, dims, keepdim, **settings)
    return result if back is None else _to(result, back)


def _to(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, ShardedVolume):
        return wrap(result, [slab.to(dtype) for slab in result.slabs])
    return result.to(dtype)


@handles("Reductions", "prod", "any", "all", "count_nonzero")
def reduce_any(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reduce over dims with a function whose ``dim`` argument is special."""
    given = bound("input dim keepdim", args, kwargs, dim=None, keepdim=False)
    volume = given["input"]
    dims = dims_of(given["dim"], volume.ndim)
    if func.__name__ == "count_nonzero":
        ones = wrap(volume, [(slab != 0).long() for slab in volume.slabs])
        return over_dims("sum", ones, dims)
    if func.__name__ == "prod":
        settings = {"dtype": given["dtype"]} if given.get("dtype") else {}
        return over_dims("prod", volume, dims, given["keepdim"], **settings)
    return over_dims(func.__name__, volume, dims, given["keepdim"])


@handles("Reductions", "max", "min")
def extremum(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reduce to the extremum, or over one uncut dim with indices, or take the larger of two tensors."""
    from volseg.parallel.sharding.operators.channels import along_dim
    from volseg.parallel.sharding.operators.pointwise import pointwise

    given = bound("input dim keepdim", args, kwargs, dim=None)
    if isinstance(given["dim"], Tensor) or "other" in given:
        return pointwise(torch.maximum if func.__name__ == "max" else torch.minimum, args, kwargs)
    if given["dim"] is None:
        kind = "amax" if func.__name__ == "max" else "amin"
        return over_dims(kind, given["input"], list(range(given["input"].ndim)))
    return along_dim(func, args, kwargs)


@handles("Reductions", "var", "std", "var_mean", "std_mean")
def variance(func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Combine the slabs' means and variances."""
    # var(unbiased), or var(dim, unbiased, keepdim)
    unbiased_first = len(args) > 1 and isinstance(args[1], bool)
    names = ("input", "unbiased") if unbiased_first else ("input", "dim", "unbiased", "keepdim")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    given = bound("", (), kwargs, dim=None, keepdim=False)
    volume = given["input"]
    correction = given.get("correction", int(given.get("unbiased", True)))
    correction = 1 if correction is None else correction
    dims, keepdim = dims_of(given["dim"], volume.ndim), given["keepdim"]
    if not set(dims) & set(volume.dims):
        slabs = [torch.var_mean(slab, dims, correction=correction, keepdim=keepdim) for slab in volume.slabs]
        kept = volume.dims if keepdim else [_shifted(dim, dims) for dim in volume.dims]
        spread: Any = wrap(volume, [var for var, _ in slabs], kept)
        center: Any = wrap(volume, [mean for _, mean in slabs], kept)
        if "std" in func.__name__:
            spread = wrap(spread, [slab.sqrt() for slab in spread.slabs])
    else:
        center, squares, count = moments(volume, dims)
        spread = (squares / max(count - correction, 0)).to(volume.dtype)
        center = center.to(volume.dtype)
        spread = spread.sqrt() if "std" in func.__name__ else spread
        if not keepdim:
            spread, center = _squeeze(spread, dims), _squeeze(center, dims)
    return (spread, center) if "mean" in func.__name__ else spread


def moments(volume: ShardedVolume, dims: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Return mean and sum of squared deviations over dims (kept with extent one), and the number of voxels.

    References
    ----------
    .. [1] T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
       variances", 1979, equation 2.1.
    """
    wide = torch.float32 if volume.dtype in HALF else volume.dtype
    pairs = [torch.var_mean(slab.to(wide), list(dims), correction=0, keepdim=True) for slab in volume.slabs]
    variances = stacked(volume, [var for var, _ in pairs], dims)
    means = stacked(volume, [mean for _, mean in pairs], dims)
    cut = [dim for dim in volume.dims if dim in dims]
    counts = slab_counts(volume, dims).to(means)
    total = prod(volume.shape[dim] for dim in dims)
    mean = (means * counts).sum(cut, keepdim=True) / total
    squares = ((variances + (means - mean).square()) * counts).sum(cut, keepdim=True)
    return mean, squares, total


def slab_counts(volume: ShardedVolume, dims: Sequence[int]) -> Tensor:
    """Return how many voxels each shard reduces, shaped to broadcast against the stacked results."""
    counts = torch.ones([1] * volume.ndim, dtype=torch.float64)
    for dim, shards in zip(volume.dims, volume.context.communicator.grid, strict=True):
        if dim in dims:
            planes = [stop - start for start, stop in spans(volume.shape[dim], shards)]
            shape = [1] * volume.ndim
            shape[dim] = shards
            counts = counts * torch.tensor(planes, dtype=torch.float64).reshape(shape)
    return counts * prod(volume.shape[dim] for dim in dims if dim not in volume.dims)


@handles("Reductions", "norm", "Tensor.norm", "linalg.vector_norm")
def norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a vector norm over dims."""
    kwargs = {"p" if key == "ord" else "input" if key == "x" else key: value for key, value in kwargs.items()}
    given = bound("input p dim keepdim", args, kwargs, p="fro", dim=None, keepdim=False)
    volume, order = given["input"], given["p"]
    if given.get("dtype") is not None or not (order in ("fro", None) or isinstance(order, int | float)):
        return unsupported(
            func, args, kwargs, f"p={order!r} with dtype={given.get('dtype')} is not a plain vector norm"
        )
    order = 2.0 if order in ("fro", None) else float(order)
    dims = dims_of(given["dim"], volume.ndim)

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        return torch.linalg.vector_norm(tensor, order, list(over), keep)

    if order == 0 or order == -inf:
        return unsupported(func, args, kwargs, f"p={order!r} is not a norm of norms")
    return reduce_slabs(volume, dims, given["keepdim"], function)


@handles("Reductions", "allclose", "equal")
def compare(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Compare all voxels; the answer is the same on every shard."""
    from volseg.parallel.sharding.operators.pointwise import pointwise

    if func.__name__ == "equal":
        if args[0].shape != args[1].shape:
            return False
        same = pointwise(torch.eq, args, kwargs)
    else:
        same = pointwise(torch.isclose, args, kwargs)
    return bool(over_dims("all", same, list(range(same.ndim))))


@handles("Reductions", "masked_select")
def masked_select(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the chosen voxels as an ordinary tensor, in the volume's order: the operands are gathered for it."""
    return run_gathered(func, args, kwargs)
