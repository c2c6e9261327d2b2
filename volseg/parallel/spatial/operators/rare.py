"""Functions without a form on slabs: they run on the gathered volume, or as torch's own Python code.

Networks rarely call them at full resolution. A gather of a large volume is logged once.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.gathered import gather
from volseg.parallel.spatial.table import handles

COUNTS = ["argwhere", "bincount", "bucketize", "histc", "isin", "nonzero", "searchsorted"]
COUNTS += ["unique", "unique_consecutive"]
DIMS = ["Tensor.unfold", "torch.pixel_shuffle", "torch.pixel_unshuffle"]
LOSSES = ["cosine_similarity", "gaussian_nll_loss", "multilabel_soft_margin_loss", "pairwise_distance"]
LOSSES += ["triplet_margin_loss", "triplet_margin_with_distance_loss"]
PRODUCTS = ["addmm", "addmv", "baddbmm", "dot", "ger", "inner", "mv", "outer", "torch.tensordot", "vdot"]
RANDOM = ["bernoulli", "torch.rand_like", "torch.randn_like", "torch.randint_like"]
REDUCTIONS = ["allclose", "dist", "equal", "linalg.norm", "masked_select", "trapezoid", "trapz"]
SLICES = ["diff", "F.embedding", "index_add", "index_copy", "index_fill", "index_select"]


@handles("Activations", "F.rrelu", "torch.rrelu", rehearse=False, merged=True)
@handles("Along channels", "nanquantile", "quantile", rehearse=False, merged=True)
@handles("Counts", *COUNTS, rehearse=False, merged=True)
@handles("Dims", *DIMS, rehearse=False, merged=True)
@handles("Interpolation", "F.grid_sample", rehearse=False, merged=True)
@handles("Losses", *(f"F.{name}" for name in LOSSES), rehearse=False, merged=True)
@handles("Normalisation", "F.local_response_norm", rehearse=False, merged=True)
@handles("Pooling", "F.lp_pool1d", "F.lp_pool2d", "F.lp_pool3d", rehearse=False, merged=True)
@handles("Products", *PRODUCTS, rehearse=False, merged=True)
@handles("Random numbers", *RANDOM, rehearse=False, merged=True)
@handles("Reductions", *REDUCTIONS, rehearse=False, merged=True)
@handles("Slices and joins", *SLICES, rehearse=False, merged=True)
def gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run on the gathered volume."""
    return gather(func, args, kwargs)


@handles("Along channels", "F.normalize", "F.softmin", rehearse=False, merged=True)
@handles("Products", "F.multi_head_attention_forward", rehearse=False, merged=True)
def as_written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run torch's own Python code on volumes: the operator table has the functions that it calls."""
    with with_overrides():
        return _without_overrides(func)(*args, **kwargs)


@cache
def _without_overrides(func: Any) -> Callable:
    """Return a copy of a torch function that does not look for ``__torch_function__`` overrides."""
    asking = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    inside = {**func.__globals__, **dict.fromkeys(asking, lambda *_: False)}
    own = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    own.__kwdefaults__ = func.__kwdefaults__
    return own
