"""Functions along dims, mostly the channels: slab by slab, or of the gathered volume if one of the dims is cut."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.gathered import gather
from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.lazy.scores import soften
from volseg.parallel.spatial.operators.operands import dims_of, rewrap, run_local, wrap_reduced
from volseg.parallel.spatial.operators.pointwise import pointwise
from volseg.parallel.spatial.operators.reductions import extremes
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume

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
