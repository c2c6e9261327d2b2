"""Functions that torch itself writes in Python: its own code runs on volumes, step by step through the table."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from volseg.parallel.sharding.table import handles

__all__ = ["composed"]


@handles(
    "Losses",
    "F.gaussian_nll_loss",
    "F.multilabel_soft_margin_loss",
    "F.triplet_margin_with_distance_loss",
    rehearse=False,
)
@handles("Pooling", "F.lp_pool1d", "F.lp_pool2d", "F.lp_pool3d", rehearse=False)
def composed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run torch's own Python on volumes."""
    with torch._C._EnableTorchFunction():
        return _without_overrides(func)(*args, **kwargs)


@cache
def _without_overrides(func: Any) -> Callable:
    """Return a function of torch that does not ask whether somebody else wants to run it."""
    asking = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    inside = {**func.__globals__, **dict.fromkeys(asking, lambda *_: False)}
    own = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    own.__kwdefaults__ = func.__kwdefaults__
    return own
