"""Functions along one uncut dim, mostly the channels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.parallel.spatial.lazy.attention import waits
from volseg.parallel.spatial.lazy.scores import soften
from volseg.parallel.spatial.operators.operands import elementwise, rewrap, run_local, wrap_reduced
from volseg.parallel.spatial.operators.pointwise import pointwise
from volseg.parallel.spatial.operators.reductions import HALF, extremes, over_dims
from volseg.parallel.spatial.signatures import bind
from volseg.parallel.spatial.table import handles, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap

ALONG_ONE = [
    "softmax",
    "log_softmax",
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
"""Functions whose ``dim`` is the last dim by default; the others take all dims, or require ``dim``."""


@handles("Along channels", *ALONG_ONE, merged=True)
def along_dim(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on each slab along an uncut ``dim``; a softmax may also run along the cut."""
    named = bind(func, args, kwargs)
    volume = named["input"]
    dim = named.get("dim", -1 if func.__name__ in LAST else 0 if func.__name__ == "msort" else None)
    if not isinstance(volume, ShardedVolume) or not isinstance(dim, int):
        refuse(f"it needs whole lines along dim={dim}")
    if waits(volume) and func.__name__ == "softmax" and dim % volume.ndim == volume.ndim - 1:
        dtype = named.get("dtype")
        later = soften(lambda slab: torch.softmax(slab, -1, dtype=dtype), volume, dtype)
        if later is not None:
            return later
    if dim % volume.ndim in volume.dims:
        if "soft" not in func.__name__:
            refuse(f"it needs whole lines along dim={dim}")
        return _softmax(func.__name__, volume, dim % volume.ndim, named.get("dtype"))
    rest = args[1:] if args else ()
    settings = {name: value for name, value in kwargs.items() if value is not volume}
    return _per_slab(volume, dim, [func(slab, *rest, **settings) for slab in volume.slabs])


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


def _softmax(name: str, volume: ShardedVolume, dim: int, dtype: torch.dtype | None) -> Any:
    """Compute a softmax, or its logarithm, along a cut dim; 16-bit voxels are computed in float32."""
    dtype = volume.dtype if dtype is None else dtype
    wide = torch.float32 if dtype in HALF else dtype
    if torch.is_autocast_enabled(volume.device.type):
        dtype = wide
    scores = wrap(volume, [slab.to(wide) for slab in volume.slabs])
    with torch.no_grad():
        largest = over_dims("amax", scores, [dim], keepdim=True)
    # A line that holds only minus infinity gives NaN in torch, too.
    scores = elementwise(torch.sub, scores, largest)
    total = over_dims("sum", elementwise(torch.exp, scores), [dim], keepdim=True)
    if name.endswith("log_softmax"):
        result = elementwise(torch.sub, scores, elementwise(torch.log, total))
    else:
        result = elementwise(torch.div, elementwise(torch.exp, scores), total)
    return elementwise(Tensor.to, result, dtype)


def _per_slab(volume: ShardedVolume, dim: int, results: Sequence[Any]) -> Any:
    """Wrap the slabs' results, tensors or tuples of tensors, with all of the volume's dims or without ``dim``."""
    if isinstance(results[0], Tensor):
        return wrap_reduced(volume, results, [dim % volume.ndim], keepdim=results[0].ndim == volume.ndim)
    return type(results[0])([_per_slab(volume, dim, column) for column in zip(*results, strict=True)])


@handles("Along channels", "gather", "take_along_dim", merged=True)
def gather(func: Callable, input: Any, index: Any, dim: int | None = None) -> Any:
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
