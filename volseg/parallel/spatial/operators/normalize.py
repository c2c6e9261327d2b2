"""Batch, instance, group and layer norm with the statistics of the whole volume.

Statistics are computed at once; scale and shift wait until the next operator is known (see ``pending``).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device import fusions
from volseg.device import layer_norm as lines_normed
from volseg.device.first_order import first_order
from volseg.device.norm.grouping import Grouping
from volseg.device.norm.reference import Running, check_sizes
from volseg.parallel.spatial.gathered import gather
from volseg.parallel.spatial.lazy.bias import take_without_bias
from volseg.parallel.spatial.lazy.norm import WaitingNorm, settle_in_checkpoint
from volseg.parallel.spatial.lazy.statistics import Affine, NormStatistics, Pooled, compute_statistics, take_statistics
from volseg.parallel.spatial.operators.operands import each_slab, spatial_only
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume, defer, wrap


def normalize(
    volume: ShardedVolume, pooled: Pooled, affine: Affine, running: Running | None = None
) -> tuple[ShardedVolume, NormStatistics, Tensor | None]:
    """Return the pending normalised volume, its statistics, and the bias in front that these leave out, or None.

    Parameters
    ----------
    volume, pooled, affine, running
        See ``compute_statistics``.
    """
    ignored = pooled.ignores_channels(*volume.shape[:2])
    slabs, lacking = take_without_bias(volume) if ignored else (volume.slabs, None)
    found = compute_statistics(volume, slabs, pooled, affine, running)
    if lacking is not None:
        found.shift.add_(lacking, alpha=0)  # a NaN or infinite bias gives NaN behind the norm, too
        if running is not None:
            running.shift(lacking)
    waiting = WaitingNorm(volume, slabs, pooled, found, affine)
    return defer(waiting, volume.dims, volume.shape, volume.context), found, lacking


def normalize_each_sample(
    func: Callable, input: ShardedVolume, running_mean: Any = None, use_input_stats: bool = True, **settings: Any
) -> Any:
    """Normalise each sample by itself."""
    if running_mean is not None and use_input_stats:
        refuse("running statistics over samples on more than one shard are not supported")
    return each_slab(func, input, running_mean=running_mean, use_input_stats=use_input_stats, **settings)


def normalize_samples(func: Callable, input: ShardedVolume, **settings: Any) -> Any:
    """Normalise each channel over all samples, as a volume whose planes are the samples."""
    outer, unit = input.merged or (1, 1)
    channels, rest = input.shape[1], input.shape[2:].numel()

    def as_planes(slab: Tensor) -> Tensor:
        return slab.reshape(outer, slab.shape[0] // (outer * unit), unit, channels, rest).permute(0, 3, 1, 2, 4)

    def as_samples(slab: Tensor, like: Tensor) -> Tensor:
        return slab.permute(0, 2, 3, 1, 4).reshape(like.shape)

    shape = (outer, channels, input.shape[0] // (outer * unit), unit, rest)
    planes = ShardedVolume([as_planes(slab) for slab in input.slabs], (2,), shape, input.context)
    result = batch_or_instance_norm(func, planes, **settings)
    slabs: Sequence[Tensor] = result.slabs
    return wrap(input, [as_samples(slab, own) for slab, own in zip(slabs, input.slabs, strict=True)])


BATCH_NORMS = ["F.batch_norm", "torch.batch_norm"]


@handles("Normalisation", *BATCH_NORMS, rehearse=False, rounded=True, samples=normalize_samples)
@handles("Normalisation", "F.instance_norm", rehearse=False, rounded=True, samples=normalize_each_sample)
def batch_or_instance_norm(
    func: Callable, input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    training: bool = False, use_input_stats: bool = True, momentum: Any = 0.1, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """Normalise each channel over the volume, for each sample or over the batch."""
    volume = input
    _check_spatial(volume)
    affine = Affine(weight, bias, eps)
    over_batch = "batch" in func.__name__
    replicas = volume.context.replicas
    parameters = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    if cut := [name for name, value in parameters.items() if isinstance(value, ShardedVolume)]:
        refuse(f"its {cut[0]} must be an ordinary tensor")
    check_sizes(volume.shape[1], **parameters)
    if not (training if over_batch else use_input_stats):
        return _with_given(volume, running_mean, running_var, affine)
    moved = Running.find(running_mean, running_var, momentum)
    refuse_if(volume.shape[0] == 0, "an empty batch has no statistics")
    if replicas is not None:
        replicas.check_norm(over_batch, moved is not None)
    count = volume.shape[2:].numel() * (volume.shape[0] if over_batch else 1)
    if count == 1 and (replicas is None or not over_batch):  # torch's rule
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {volume.shape}")
    if over_batch:
        pooled = Pooled(Grouping(over_batch=True), replicas)
        return settle_in_checkpoint(normalize(volume, pooled, affine, moved)[0])
    result, found, lacking = normalize(volume, Pooled(), affine)
    settle_in_checkpoint(result)  # torch's instance norm changes its running statistics last, its batch norm first
    if moved is not None:
        with torch.no_grad():
            alone = volume.shape[0] == 1
            center, variance = (value[0] if alone else value.mean(0) for value in (found.mean, found.variance))
            moved.update(center, variance, count)
            if lacking is not None:
                moved.shift(lacking)
    return result


def _check_spatial(volume: Any) -> None:
    if not isinstance(volume, ShardedVolume) or not spatial_only(volume, volume.ndim - 2):
        refuse("the volume must be cut along spatial dims")


def _with_given(volume: ShardedVolume, mean: Tensor | None, var: Tensor | None, affine: Affine) -> ShardedVolume:
    """Normalise with the running statistics."""
    fits = volume.dtype.is_floating_point and 0 not in volume.shape and fusions.is_on("given statistics")
    if mean is None or var is None or not fits:
        weight, bias, eps = affine
        return each_slab(
            F.batch_norm, volume, mean, var, weight, bias, False, 0.0, eps
        )  # torch reports what is missing
    slabs, lacking = take_without_bias(volume)
    if lacking is not None:
        mean = mean.to(lacking.device) - lacking  # of the slabs, which lack the bias
    found = take_statistics(volume, slabs, Running(mean, var, 0.0), affine)
    waiting = WaitingNorm(volume, slabs, Pooled(given=True), found, affine)
    return settle_in_checkpoint(defer(waiting, volume.dims, volume.shape, volume.context))


@handles("Normalisation", "F.group_norm", "torch.group_norm", rounded=True, samples=each_slab)
def group_norm(
    func: Callable, input: Any, num_groups: int, weight: Any, bias: Any, eps: float, cudnn_enabled: bool = True
) -> Any:
    """Normalise groups of channels of each sample over the volume."""
    _check_spatial(input)
    pooled = Pooled(Grouping(groups=num_groups))
    return settle_in_checkpoint(normalize(input, pooled, Affine(weight, bias, eps))[0])


@handles("Normalisation", "F.rms_norm", "torch.rms_norm", merged=True)
def rms_norm(
    func: Callable, input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Normalise over the last dims, as ``layer_norm`` does."""
    if not isinstance(input, ShardedVolume) or any(input.ndim - len(normalized_shape) <= dim for dim in input.dims):
        return gather(func, (input, normalized_shape, weight, eps), {})
    return each_slab(func, input, normalized_shape, weight, eps=eps)


@handles("Normalisation", "F.layer_norm", "torch.layer_norm", merged=True)
def layer_norm(
    func: Callable,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    cudnn_enable: Any = 1,
) -> Any:
    """Normalise over the last dims, within each slab or, if the cut is one of them, in the gathered volume."""
    volume = input
    refuse_if(not isinstance(volume, ShardedVolume), "weight and bias must be ordinary tensors")
    if any(dim >= volume.ndim - len(normalized_shape) for dim in volume.dims):
        return gather(func, (volume, normalized_shape, weight, bias, eps), {})
    if all(_has_line_kernel(slab, own, normalized_shape) for slab in volume.slabs for own in (weight, bias)):
        func = _normalize_lines
    return each_slab(func, volume, normalized_shape, weight, bias, eps=eps)


def _has_line_kernel(slab: Tensor, parameter: Tensor | None, sides: Sequence[int]) -> bool:
    """Return whether our kernel normalizes lines of a slab; under autocast, weight and bias may be float32."""
    if not lines_normed.takes_lines(slab, prod(sides)) or tuple(slab.shape[-len(sides) :]) != tuple(sides):
        return False
    alike = parameter is None or (parameter.shape == tuple(sides) and parameter.dtype in (slab.dtype, torch.float32))
    same = parameter is None or parameter.dtype == slab.dtype or torch.is_autocast_enabled(slab.device.type)
    return alike and same and fusions.is_on("layer norms")


def _normalize_lines(
    slab: Tensor, sides: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    dtype = torch.float32 if torch.is_autocast_enabled(slab.device.type) else slab.dtype
    result: Tensor = _LayerNorm.apply(slab, weight, bias, prod(sides), eps, dtype)
    return result.view(slab.shape)  # here: torch refuses to change a view in place that a custom function returns


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slab: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int, eps: float,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        factor, shift = (None if value is None else value.reshape(-1).contiguous() for value in (weight, bias))
        out, means, rstds = lines_normed.normalize_lines(_as_lines(slab, channels), factor, shift, eps, dtype)
        ctx.channels, ctx.of_bias = channels, None if bias is None else (bias.shape, bias.dtype)
        ctx.save_for_backward(slab, weight, means, rstds)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slab, weight, means, rstds = ctx.saved_tensors
        lines, slopes = (_as_lines(tensor, ctx.channels) for tensor in (slab, gradient))
        flat = None if weight is None else weight.reshape(-1).contiguous()
        of_slab, of_weight, of_bias = lines_normed.differentiate_lines(slopes, lines, flat, means, rstds)
        return (
            of_slab.view(slab.shape),
            None if weight is None else of_weight.view(weight.shape).to(weight.dtype),
            None if ctx.of_bias is None else of_bias.view(ctx.of_bias[0]).to(ctx.of_bias[1]),
            *(None, None, None),
        )


def _as_lines(tensor: Tensor, channels: int) -> Tensor:
    """Return a tensor's lines, ``(R, C)``, with a channel stride of 1."""
    lines = tensor.reshape(-1, channels)
    return lines if lines.stride(1) == 1 else lines.contiguous()
