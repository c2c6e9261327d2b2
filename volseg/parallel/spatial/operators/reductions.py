"""Reductions over any dims; over a cut dim they return an ordinary tensor, bit-identical on every shard.

Functions of all voxels that return no volume run on the gathered volume.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.parallel.spatial.gathered import name_of, run_gathered, say_gathered, volumes
from volseg.parallel.spatial.operators.operands import aligned, dims_of, elementwise, wrap_reduced
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, wrap

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
        return elementwise(lambda own: (own / count).to(dtype), total)

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        if kind == "prod":  # takes one dim at a time
            for dim in over:
                tensor = tensor.prod(dim, keepdim=True, **settings)
        else:
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
    if isinstance(tensor, ShardedVolume):
        return wrap_reduced(tensor, [_squeeze(slab, dims) for slab in tensor.slabs], dims)
    for dim in sorted(dims, reverse=True):
        tensor = tensor.squeeze(dim)
    return tensor


@handles("Reductions", "sum", "mean", "nansum", "prod", "any", "all", "amax", "amin", merged=True)
@handles("Reductions", "logsumexp", "special.logsumexp", merged=True)
def reduce(func: Callable, input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Reduce over dims."""
    dims = dims_of(dim, input.ndim)
    kind, back = func.__name__.removeprefix("special_"), None
    if kind in ("amax", "amin"):
        return extremes(kind, input, dims, keepdim)
    if dtype is None and kind in ("sum", "nansum", "prod") and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.int64
    if kind == "sum" and input.dtype in HALF and dtype is None:
        # Partial sums are added in float32 and rounded once, as on one device.
        dtype = torch.float32
        back = None if torch.is_autocast_enabled("cuda") and input.is_cuda else input.dtype
    refuse_if(kind == "nansum" and input.dtype in HALF, "nansum of 16-bit volumes would be rounded once per shard")
    result = over_dims(kind, input, dims, keepdim, **({} if dtype is None else {"dtype": dtype}))
    return result if back is None else elementwise(Tensor.to, result, back)


@handles("Reductions", "count_nonzero", merged=True)
def count_nonzero(func: Callable, input: Any, dim: Any = None) -> Any:
    """Count voxels that are not zero."""
    ones = wrap(input, [(slab != 0).long() for slab in input.slabs])
    return over_dims("sum", ones, dims_of(dim, input.ndim))


@handles("Reductions", "aminmax", merged=True)
def aminmax(func: Callable, input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the smallest and the largest voxel."""
    dims = dims_of(dim, input.ndim)
    found = extremes("amin", input, dims, keepdim), extremes("amax", input, dims, keepdim)
    return torch.return_types.aminmax(found)


def extremes(kind: str, volume: ShardedVolume, dims: Sequence[int], keepdim: bool = False) -> ShardedVolume | Tensor:
    """Return ``amax`` or ``amin`` over dims; the gradient is divided evenly among equal voxels of all slabs."""
    if not volume.requires_grad or not torch.is_grad_enabled() or not set(volume.dims) & set(dims):
        return over_dims(kind, volume, dims, keepdim)
    with torch.no_grad():
        bare = wrap(volume, [slab.detach() for slab in volume.slabs])
        value = over_dims(kind, bare, dims, keepdim=True)
        where = [slab == own for slab, own in zip(volume.slabs, aligned(value, volume), strict=True)]
        count = over_dims("sum", wrap(volume, [mask.long() for mask in where]), dims, keepdim=True)
    shares = [torch.where(mask, slab, 0.0) for mask, slab in zip(where, volume.slabs, strict=True)]
    total = over_dims("sum", wrap(volume, shares), dims, keepdim=True)
    result: ShardedVolume | Tensor = elementwise(_Value.apply, total, value, count)
    return result if keepdim else _squeeze(result, dims)


class _Value(torch.autograd.Function):
    """Return a value; its gradient is divided evenly among the ``count`` equal voxels of a sum."""

    @staticmethod
    def forward(ctx: Any, _total: Tensor, value: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(count)
        return value.clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (count,) = ctx.saved_tensors
        return gradient / count, None, None


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
        center, squares, count = moments(volume, dims)
        spread = (squares / max(count - correction, 0)).to(volume.dtype)
        center = center.to(volume.dtype)
        if not keepdim:
            spread, center = _squeeze(spread, dims), _squeeze(center, dims)
    spread = elementwise(_root, spread) if "std" in func.__name__ else spread
    return (spread, center) if "mean" in func.__name__ else spread


def _root(variance: Tensor) -> Tensor:
    """Return the standard deviation; where it is zero, its gradient is zero too, as in torch."""
    zero = variance == 0
    return variance.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


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
    for dim, extents in zip(volume.dims, volume.extents(), strict=True):
        if dim in dims:
            shape = [1] * volume.ndim
            shape[dim] = len(extents)
            counts = counts * torch.tensor(extents, dtype=torch.float64).reshape(shape)
    return counts * prod(volume.shape[dim] for dim in dims if dim not in volume.dims)


@handles("Reductions", "torch.norm", "Tensor.norm", "linalg.vector_norm", merged=True)
def norm(func: Callable, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, ord: Any = None) -> Any:
    """Return a vector norm over dims."""
    order = p if ord is None else ord
    if not (order in ("fro", None) or isinstance(order, int | float)):
        refuse(f"p={order!r} is not a plain vector norm")
    order = 2.0 if order in ("fro", None) else float(order)
    dims = dims_of(dim, input.ndim)

    def function(tensor: Tensor, over: Sequence[int], keep: bool) -> Tensor:
        return torch.linalg.vector_norm(tensor, order, list(over), keep)

    if set(dims) & set(input.dims):
        if order == 0:
            return run_gathered(torch.linalg.vector_norm, (input, order, dims, keepdim), {})
        if order in (inf, -inf):
            magnitudes = wrap(input, [slab.abs() for slab in input.slabs])
            return extremes("amax" if order == inf else "amin", magnitudes, dims, keepdim)
    return reduce_slabs(input, dims, keepdim, function)


@handles("Reductions", "linalg.norm", merged=True)
def matrix_or_vector_norm(func: Callable, input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False) -> Any:
    """Return a vector norm, or a matrix norm of the gathered volume."""
    if ord is None or (isinstance(dim, int) or (dim is not None and len(dim) == 1)):
        return norm(torch.linalg.vector_norm, input, 2 if ord is None else ord, dim, keepdim)
    return gathered(func, (input, ord, dim, keepdim), {})


@handles("Reductions", "equal", rehearse=False, merged=True)
def equal(func: Callable, input: Any, other: Any) -> bool:
    """Return whether all voxels are equal; the result is the same on every shard."""
    if input.shape != other.shape:
        return False
    same = elementwise(torch.eq, input, other)
    return bool(over_dims("all", same, list(range(same.ndim))))


@handles("Reductions", "allclose", rehearse=False, merged=True)
def allclose(
    func: Callable, input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether all voxels are close; the result is the same on every shard."""
    torch.broadcast_shapes(input.shape, other.shape)
    same = elementwise(torch.isclose, input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(over_dims("all", same, list(range(same.ndim))))


COUNTS = ["argwhere", "bincount", "bucketize", "histc", "isin", "nonzero", "searchsorted"]
COUNTS += ["unique", "unique_consecutive"]
RARE_REDUCTIONS = ["dist", "masked_select", "nanmean", "trapezoid", "trapz"]
RARE_PRODUCTS = ["ger", "inner", "outer", "torch.tensordot"]


@handles("Counts", *COUNTS, rehearse=False, merged=True)
@handles("Reductions", *RARE_REDUCTIONS, rehearse=False, merged=True)
@handles("Along channels", "nanquantile", "quantile", rehearse=False, merged=True)
@handles("Losses", "F.triplet_margin_loss", rehearse=False, merged=True)
@handles("Products", *RARE_PRODUCTS, rehearse=False, merged=True)
@handles("Slices and joins", "diff", "index_add", "index_copy", "index_fill", rehearse=False, merged=True)
def gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run rare functions, and those whose result has another number of voxels, on the gathered volume."""
    for volume in volumes((args, kwargs)):
        say_gathered(volume, f"calls {name_of(func)} with")
    return run_gathered(func, args, kwargs)
