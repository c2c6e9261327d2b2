"""Functions whose sharded form is made of other functions.

They consist of torch functions, each of which the operator table handles by itself. For some of them ``as_written``
runs torch's own Python code. The others are written out here.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.table import handles


@handles("Dims", "torch.broadcast_tensors", merged=True)
def broadcast_tensors(func: Callable, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Expand tensors to one shape; no cut dim is expanded."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], list | tuple) else tensors
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    with with_overrides():
        return tuple(tensor.expand(shape) for tensor in given)


@handles("Dims", "torch.pixel_shuffle", rehearse=False, merged=True)  # torch's error on the meta device names no cause
def pixel_shuffle(func: Callable, input: Tensor, upscale_factor: int) -> Tensor:
    """Rearrange channels into rows and columns."""
    factor, (*front, channels, height, width) = upscale_factor, input.shape
    if factor <= 0 or channels % factor**2:
        raise RuntimeError(f"the square of upscale_factor must divide the channels, got {factor} for {(*input.shape,)}")
    sides = channels // factor**2, factor, factor, height, width
    with with_overrides():
        parts = input.reshape(-1, *sides).permute(0, 1, 4, 2, 5, 3)
        return parts.reshape(*front, channels // factor**2, height * factor, width * factor)


@handles("Dims", "torch.pixel_unshuffle", rehearse=False, merged=True)
def pixel_unshuffle(func: Callable, input: Tensor, downscale_factor: int) -> Tensor:
    """Rearrange rows and columns into channels."""
    factor, (*front, channels, height, width) = downscale_factor, input.shape
    if factor <= 0 or height % factor or width % factor:
        raise RuntimeError(f"downscale_factor must divide rows and columns, got {factor} for {(*input.shape,)}")
    sides = channels, height // factor, factor, width // factor, factor
    with with_overrides():
        parts = input.reshape(-1, *sides).permute(0, 1, 3, 5, 2, 4)
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
