"""Functions composed of other torch functions, each of which the operator table handles by itself.

For some functions ``as_written`` runs torch's own Python code. The others are written out here, as handlers that get
the torch function's arguments: volumes and ordinary tensors.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.table import composes, handles


@composes("Dims", "torch.broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Expand tensors to one shape; no cut dim is expanded."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return tuple(tensor.expand(shape) for tensor in given)


@composes("Dims", "torch.pixel_shuffle")
def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Rearrange channels into rows and columns."""
    factor, (*front, channels, height, width) = upscale_factor, input.shape
    if factor <= 0 or channels % factor**2:
        raise RuntimeError(f"pixel_shuffle expects channels divisible by {factor**2}, got {tuple(input.shape)}")
    parts = input.reshape(-1, channels // factor**2, factor, factor, height, width).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(*front, channels // factor**2, height * factor, width * factor)


@composes("Dims", "torch.pixel_unshuffle")
def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Rearrange rows and columns into channels."""
    factor, (*front, channels, height, width) = downscale_factor, input.shape
    if factor <= 0 or height % factor or width % factor:
        raise RuntimeError(f"pixel_unshuffle expects planes divisible by {factor}, got {tuple(input.shape)}")
    parts = input.reshape(-1, channels, height // factor, factor, width // factor, factor).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(*front, channels * factor**2, height // factor, width // factor)


@handles(
    "Losses",
    "F.gaussian_nll_loss",
    "F.multilabel_soft_margin_loss",
    "F.triplet_margin_with_distance_loss",
    rehearse=False,
    merged=True,
)
@handles("Along channels", "F.normalize", "F.softmin", rehearse=False, merged=True)
@handles("Products", "F.multi_head_attention_forward", rehearse=False, merged=True)
@handles("Pooling", "F.lp_pool1d", "F.lp_pool2d", "F.lp_pool3d", rehearse=False, merged=True)
def as_written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run torch's own Python code on volumes."""
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
