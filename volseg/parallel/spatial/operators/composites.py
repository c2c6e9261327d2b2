"""Functions whose sharded form is made of other functions, and functions of batches of slices.

Composed functions consist of torch functions, each of which the operator table handles by itself. For some of them
``as_written`` runs torch's own Python code. The others are written out here.

Volumes cut along dim 0 are slices of one volume as samples of a batch, for networks of 2D convolutions:
``x.transpose(1, 2).reshape(B * D, C, H, W)`` makes a batch of the slices, cut between them. Functions that treat
each sample by itself run on each shard unchanged; batch norm combines the shards' statistics.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import with_overrides
from volseg.parallel.spatial.operators import normalize
from volseg.parallel.spatial.operators.operands import call_each, rewrap
from volseg.parallel.spatial.signatures import fill
from volseg.parallel.spatial.table import handles, handles_samples, refuse
from volseg.parallel.spatial.volume import ShardedVolume, wrap


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


@handles_samples("F.adaptive_avg_pool1d", "F.adaptive_avg_pool2d", "F.adaptive_avg_pool3d")
@handles_samples("F.adaptive_max_pool1d", "F.adaptive_max_pool2d", "F.adaptive_max_pool3d")
@handles_samples("F.max_pool1d", "F.max_pool2d", "F.max_pool3d")
@handles_samples("torch.max_pool1d", "torch.max_pool2d", "torch.max_pool3d")
@handles_samples("torch.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d")
@handles_samples("F.interpolate", "F.group_norm", "torch.group_norm", "prelu", "F.prelu")
def each_sample(func: Callable, input: ShardedVolume, **settings: Any) -> Any:
    """Run on each slab."""
    return rewrap(input, call_each(func, input, **settings))


@handles_samples("torch.conv1d", "torch.conv2d", "torch.conv3d")
@handles_samples("torch.conv_transpose1d", "torch.conv_transpose2d", "torch.conv_transpose3d")
def convolution(func: Callable, input: ShardedVolume, weight: Tensor, **settings: Any) -> Any:
    """Convolve each sample."""
    if input.ndim != weight.ndim or isinstance(weight, ShardedVolume):
        refuse("dim 0 are its channels, which are cut, or its weight is sharded")
    return each_sample(func, input, weight=weight, **settings)


@handles_samples("F.instance_norm")
def instance_norm(
    func: Callable, input: ShardedVolume, running_mean: Any = None, use_input_stats: bool = True, **settings: Any
) -> Any:
    """Normalise each sample by itself."""
    if running_mean is not None and use_input_stats:
        refuse("running statistics of samples on several shards are not supported")
    return each_sample(func, input, running_mean=running_mean, use_input_stats=use_input_stats, **settings)


@handles_samples("F.batch_norm", "torch.batch_norm")
def batch_norm(func: Callable, input: ShardedVolume, **settings: Any) -> Any:
    """Normalise each channel over all samples, as a volume whose planes are the samples."""
    outer, unit = input.merged or (1, 1)
    channels, rest = input.shape[1], input.shape[2:].numel()

    def as_planes(slab: Tensor) -> Tensor:
        return slab.reshape(outer, slab.shape[0] // (outer * unit), unit, channels, rest).permute(0, 3, 1, 2, 4)

    def as_samples(slab: Tensor, like: Tensor) -> Tensor:
        return slab.permute(0, 2, 3, 1, 4).reshape(like.shape)

    shape = (outer, channels, input.shape[0] // (outer * unit), unit, rest)
    planes = ShardedVolume([as_planes(slab) for slab in input.slabs], (2,), shape, input.context)
    result = normalize.batch_or_instance_norm(func, fill(func, (planes,), settings))
    slabs: Sequence[Tensor] = result.slabs
    return wrap(input, [as_samples(slab, own) for slab, own in zip(slabs, input.slabs, strict=True)])
