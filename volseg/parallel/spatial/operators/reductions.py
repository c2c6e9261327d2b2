"""Reductions over any dims; over a cut dim they return an ordinary tensor, bit-identical on every shard.

Functions of all voxels that return no volume run on the gathered volume.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.parallel.spatial.gathered import run_gathered
from volseg.parallel.spatial.operators.operands import (
    aligned,
    call_each,
    dims_of,
    each_slab,
    elementwise,
    run_local,
    wrap_reduced,
)
from volseg.parallel.spatial.operators.pointwise import pointwise
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


@handles("Reductions", "nanmean", merged=True)
def nanmean(func: Callable, input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return the mean of the voxels that are not NaN."""
    dims = dims_of(dim, input.ndim)
    total = reduce(torch.nansum, input, dims, keepdim, dtype)
    count = over_dims("sum", wrap(input, [~slab.isnan() for slab in input.slabs]), dims, keepdim)
    return elementwise(torch.div, total, count)


@handles("Reductions", "trapezoid", "trapz", merged=True)
def trapezoid(func: Callable, y: Any, x: Any = None, dx: float = 1, dim: int = -1) -> Any:
    """Integrate along an uncut dim."""
    volume = y if isinstance(y, ShardedVolume) else x
    refuse_if(dim % volume.ndim in volume.dims, "it integrates along the cut: write it as a sum over slices")
    if isinstance(x, Tensor) and x.ndim != 1:
        like, results = run_local(func, (y, x), {"dim": dim})
        return wrap_reduced(like, results, [dim % like.ndim])
    given: tuple[Any, ...] = () if x is None else (x,)
    settings = {"dim": dim} | ({"dx": dx} if x is None else {})
    return wrap_reduced(y, call_each(func, y, *given, **settings), [dim % y.ndim])


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
            return _counted(input, dims, keepdim)
        if order in (inf, -inf):
            magnitudes = wrap(input, [slab.abs() for slab in input.slabs])
            return extremes("amax" if order == inf else "amin", magnitudes, dims, keepdim)
    return reduce_slabs(input, dims, keepdim, function)


def _counted(volume: ShardedVolume, dims: Sequence[int], keepdim: bool) -> ShardedVolume | Tensor:
    """Count the non-zero entries, as torch's norm of order zero does; the gradient is zero."""
    partials = [torch.linalg.vector_norm(slab, 0, list(dims), True) for slab in volume.slabs]
    counts = stacked(volume, partials, dims).sum([dim for dim in volume.dims if dim in dims], keepdim=True)
    return counts if keepdim else _squeeze(counts, dims)


@handles("Reductions", "linalg.norm", merged=True)
def matrix_or_vector_norm(func: Callable, input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False) -> Any:
    """Return a vector norm, or a matrix norm within each slab."""
    if ord is None or (isinstance(dim, int) or (dim is not None and len(dim) == 1)):
        return norm(torch.linalg.vector_norm, input, 2 if ord is None else ord, dim, keepdim)
    dims = dims_of(dim, input.ndim)
    refuse_if(dim is None or set(dims) & set(input.dims), "a matrix norm needs whole matrices")
    return wrap_reduced(input, [func(slab, ord, tuple(dims), keepdim) for slab in input.slabs], dims, keepdim)


@handles("Reductions", "equal", rehearse=False, merged=True)
def equal(func: Callable, input: Any, other: Any) -> bool:
    """Return whether all voxels are equal; the result is the same on every shard."""
    if input.shape != other.shape:
        return False
    same = pointwise(torch.eq, (input, other), {})
    return bool(over_dims("all", same, list(range(same.ndim))))


@handles("Reductions", "allclose", rehearse=False, merged=True)
def allclose(
    func: Callable, input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Return whether all voxels are close; the result is the same on every shard."""
    torch.broadcast_shapes(input.shape, other.shape)
    same = elementwise(torch.isclose, input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(over_dims("all", same, list(range(same.ndim))))


@handles("Reductions", "masked_select", rehearse=False, merged=True)
@handles(
    "Counts", "argwhere", "bincount", "histc", "nonzero", "unique", "unique_consecutive", rehearse=False, merged=True
)
def gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return positions, counts or selected values of the gathered volume's voxels, as an ordinary tensor."""
    return run_gathered(func, args, kwargs)


@handles("Counts", "bucketize", merged=True)
def bucketize(func: Callable, input: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Return the index of each voxel's interval between ``boundaries``, an ordinary tensor."""
    refuse_if(isinstance(boundaries, ShardedVolume), "the boundaries must be an ordinary tensor")
    settings = {"out_int32": out_int32, "right": right}
    return each_slab(lambda slab, own: func(slab.contiguous(), own, **settings), input, boundaries)


@handles("Counts", "searchsorted", merged=True, treats="sorted_sequence input out_int32 right side")
def search_sorted(func: Callable, given: Any) -> Any:
    """Return the index of each voxel's interval in a sorted sequence that all voxels share."""
    if isinstance(given.sorted_sequence, ShardedVolume) or given.sorted_sequence.ndim != 1:
        refuse("it needs one ordinary sequence for all voxels")
    settings = {"out_int32": given.out_int32, "right": given.right, "side": given.side}
    return each_slab(lambda slab, own: func(own, slab.contiguous(), **settings), given.input, given.sorted_sequence)


@handles("Counts", "isin", merged=True)
def is_in(func: Callable, elements: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False) -> Any:
    """Return for each voxel whether it is one of some numbers, or for each number whether a voxel has it."""
    settings: dict[str, Any] = {"assume_unique": assume_unique, "invert": invert}
    voxels, numbers = elements, test_elements
    if isinstance(numbers, ShardedVolume):
        return run_gathered(func, (voxels, numbers), settings)
    return each_slab(func, voxels, numbers, **settings)
