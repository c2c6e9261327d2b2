"""Convolution and transposed convolution of any kernel, stride, dilation, groups, padding and output padding."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution import choice, depthwise
from volseg.device.convolution.depth_chunks import LIMIT
from volseg.device.convolution.settings import Settings
from volseg.device.first_order import first_order
from volseg.device.layout import DIM
from volseg.parallel.spatial.context import Context, active_autocast_dtype
from volseg.parallel.spatial.convolution.plan import ConvolutionPlan, count_tiles, plan_convolution, plan_transposed
from volseg.parallel.spatial.convolution.slab import convolve
from volseg.parallel.spatial.convolution.tiles import convolve_later
from volseg.parallel.spatial.dispatch import rehearsed
from volseg.parallel.spatial.lazy.bias import add_bias_later, may_wait, sum_vanishing, vanishes, with_gradient
from volseg.parallel.spatial.operators.operands import each_slab, per_dim, spatial_only
from volseg.parallel.spatial.operators.planes import (
    AxisPlan,
    LocalWindow,
    convolution_plans,
    outside_cut,
    sharded_windows,
)
from volseg.parallel.spatial.plan.shards import can_split, spans
from volseg.parallel.spatial.plan.windows import TransposedConvolution
from volseg.parallel.spatial.table import handles, refuse, refuse_if
from volseg.parallel.spatial.volume import ShardedVolume


def convolve_samples(func: Callable, input: ShardedVolume, weight: Tensor, **settings: Any) -> Any:
    """Convolve each sample by itself."""
    if input.ndim != weight.ndim or isinstance(weight, ShardedVolume):
        refuse("its channels are cut (it has no batch dim), or its weight is sharded")
    return each_slab(func, input, weight=weight, **settings)


WRONG_CUT = "the input must be cut along spatial dims only, and the weight must be an ordinary tensor"

PLAIN = ["torch.conv1d", "torch.conv2d", "torch.conv3d"]


@handles("Convolution", *PLAIN, rehearse=False, rounded=True, samples=convolve_samples)
def convolution(
    func: Callable, input: Any, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    """Convolve each slab, extended by its halo, without padding along the cut."""
    volume, count = input, weight.ndim - 2
    refuse_if(not spatial_only(volume, count), WRONG_CUT)

    def rehearse() -> None:
        rehearsed(func, (volume, weight, bias, stride, padding, dilation, groups), {}, volume)

    chosen = _direct(volume, weight.shape, stride, padding, dilation, groups, rehearse)
    if chosen is not None:
        return convolve(volume, weight, bias, chosen)
    rehearse()
    kernel = weight.shape[2:]
    stride, dilation = per_dim(stride, count), per_dim(dilation, count)
    before, after = _padding(padding, kernel, dilation)
    plans = convolution_plans(volume, (kernel, stride, before, dilation), after)
    cut = [dim - (volume.ndim - count) for dim in volume.dims]
    inside = outside_cut(volume, before)
    if any(before[i] != after[i] for i in range(count) if i not in cut):
        refuse("padding='same' pads an even kernel on one side more than on the other; use F.pad before it")
    weights, biases = _spread(volume, weight), _spread(volume, bias)

    def local(slab: Tensor, _windows: list[LocalWindow], position: int) -> Tensor:
        return func(slab, weights[position], biases[position], stride, inside, dilation, groups)

    def whole(tensor: Tensor) -> Tensor:
        own = (weights[0], biases[0]) if volume.context.communicator.num_shards == 1 else (weight, bias)
        return func(tensor, *own, stride, padding, dilation, groups)

    return sharded_windows(volume, plans, local, whole, reads_only=True)


TRANSPOSED = ["torch.conv_transpose1d", "torch.conv_transpose2d", "torch.conv_transpose3d"]


@handles("Convolution", *TRANSPOSED, rounded=True, samples=convolve_samples)
def transposed_convolution(
    func: Callable, input: Any, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any,
) -> Any:  # fmt: skip
    """Run a transposed convolution on the input planes that contribute to each slab's outputs."""
    volume, count = input, weight.ndim - 2
    refuse_if(not spatial_only(volume, count), WRONG_CUT)
    stride, dilation = per_dim(stride, count), per_dim(dilation, count)
    padding, extra = per_dim(padding, count), per_dim(output_padding, count)
    first = volume.ndim - count
    windows = []
    for dim, size in zip(volume.dims, volume.sizes, strict=True):
        i = dim - first
        window = TransposedConvolution(weight.shape[2 + i], stride[i], padding[i], dilation[i])
        windows.append((window, window.outputs(size, extra[i])))
    inside, extra_inside = outside_cut(volume, padding), outside_cut(volume, extra)
    along = Settings(tuple(stride), tuple(inside), tuple(dilation), True, tuple(extra_inside), groups)
    context = volume.context
    if len(windows) == 1 and can_split(windows[0][1], context.communicator.num_shards):
        key = volume.shape, volume.dims, *windows, weight.shape, along, context.channels_last
        chosen = context.planned(key, lambda: plan_transposed(volume, *windows[0], along))
        if chosen is not None:
            return convolve(volume, weight, bias, chosen)
    plans = [AxisPlan(*window) for window in windows]
    weights, biases = _spread(volume, weight), _spread(volume, bias)

    def is_disjoint(padding: list[int], extra: list[int]) -> bool:
        """Return whether each input plane has its own output planes."""
        return list(weight.shape[2:]) == stride and not any(padding) and not any(extra)

    if volume.context.tiled and is_disjoint(padding, extra):
        later = _convolve_later(volume, weights, biases, stride, groups)
        if later is not None:
            return later

    waits = may_wait(bias, weight, volume._slabs[0], weight.shape[1] * groups)

    def run(slab: Tensor, own: tuple[Any, Any], padding: list[int], extra: list[int]) -> Tensor:
        def run_part(part: Tensor) -> Tensor:
            settings = Settings(tuple(stride), tuple(padding), tuple(dilation), True, tuple(extra), groups)
            ours = convolve_transposed(volume.context, part, *own, settings)
            return func(part, *own, stride, padding, extra, groups, dilation) if ours is None else ours

        elements = slab.shape[0] * slab.shape[2:].numel() * weight.shape[1] * groups * prod(stride)
        if not is_disjoint(padding, extra) or count != 3 or elements <= LIMIT:
            return run_part(slab)
        # See ``depth_chunks`` for why not all at once.
        stacks = min(slab.shape[2], -(-2 * elements // LIMIT))
        return torch.cat([run_part(part) for part in slab.tensor_split(stacks, 2)], 2)

    def local(slab: Tensor, _windows: list[LocalWindow], position: int) -> Tensor:
        return run(slab, (weights[position], None if waits else biases[position]), inside, extra_inside)

    def whole(tensor: Tensor) -> Tensor:
        alone = volume.context.communicator.num_shards == 1
        return run(tensor, (weights[0], None if waits else biases[0]) if alone else (weight, bias), padding, extra)

    result = sharded_windows(volume, plans, local, whole, reads_only=True)
    if not waits or not isinstance(result, ShardedVolume):
        return result
    biases = [volume.context.cast(copy, result.dtype) for copy in biases]
    return add_bias_later(with_gradient(result, biases), biases)


def _direct(
    volume: ShardedVolume, weight: torch.Size, stride: Any, padding: Any, dilation: Any, groups: int,
    rehearse: Callable[[], None],
) -> ConvolutionPlan | None:  # fmt: skip
    """Return the plan of a convolution without the general exchange, or None; cached per size and layer."""
    if (isinstance(padding, str) and padding != "valid") or len(volume.dims) != 1:
        return None
    context, count = volume.context, len(weight) - 2
    stride, dilation = tuple(per_dim(stride, count)), tuple(per_dim(dilation, count))
    padding = (0,) * count if padding == "valid" else tuple(per_dim(padding, count))

    def make() -> ConvolutionPlan | None:
        rehearse()  # once per layer: raises what torch raises
        whole = Settings(stride, padding, dilation, False, (0,) * count, groups)
        along = replace(whole, padding=tuple(outside_cut(volume, padding)))
        kernel, i = weight[2:], volume.dims[0] - (volume.ndim - count)
        (plan,) = convolution_plans(volume, (kernel, stride, padding, dilation))
        if not can_split(plan.outputs, context.communicator.num_shards):
            return None
        return plan_convolution(volume, plan.window, plan.outputs, whole, along, (kernel[i] - 1) * dilation[i] + 1)

    layer = weight, stride, padding, dilation, groups
    key = volume.shape, volume.dims, *layer, context.channels_last, context.frugal
    found: ConvolutionPlan | None = context.planned(key, make)
    return found


def _spread(volume: Any, tensor: Tensor | None) -> list[Any]:
    return [None] * len(volume._slabs) if tensor is None else volume.context.spread(tensor)


def _padding(padding: Any, kernel: torch.Size, dilation: list[int]) -> tuple[list[int], list[int]]:
    """Return the planes of padding before and after, along each spatial dim."""
    if padding == "same":
        total = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        return [t // 2 for t in total], [t - t // 2 for t in total]
    before = [0] * len(kernel) if padding == "valid" else per_dim(padding, len(kernel))
    return before, before


def _convolve_later(
    volume: ShardedVolume, weights: list[Tensor], biases: list[Any], stride: list[int], groups: int
) -> ShardedVolume | None:
    """Defer a transposed convolution with a large result, if each slab needs only its own planes; else return None."""
    context, num_shards = volume.context, volume.context.communicator.num_shards
    if volume.ndim != 5 or volume.dims != (DIM,) or not context.communicator.is_direct:
        return None
    planes = volume.shape[DIM]
    own = [(start * stride[0], stop * stride[0]) for start, stop in spans(planes, num_shards)]
    channels = weights[0].shape[1] * groups
    elements = volume.shape[0] * channels * volume.shape[DIM:].numel() * prod(stride) // num_shards
    tiles = count_tiles(elements, planes // num_shards)
    if tiles < 2 or spans(planes * stride[0], num_shards) != own:
        return None
    dtype = volume.dtype
    if dtype != torch.float64 and active_autocast_dtype(volume) not in (None, dtype):
        return None  # autograd converts it
    biases = [] if biases[0] is None else biases
    settings = Settings(tuple(stride), (0,) * 3, (1,) * 3, True, (0,) * 3, groups)
    plan = ConvolutionPlan(settings, (), planes * stride[0], context.channels_last, tiles=tiles)
    weights, biases = ([context.cast(copy, dtype) for copy in copies] for copies in (weights, biases))
    return convolve_later(volume, weights, biases, plan)


def convolve_transposed(
    context: Context, slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> Tensor | None:
    """Return the transposed convolution of a channels-last slab by our kernel, or None if torch should compute it."""
    if not (context.channels_last and depthwise.fits(weight.shape, settings)):
        return None
    dtype = active_autocast_dtype(slab)
    if dtype is not None and slab.dtype != torch.float64:
        slab, weight = slab.to(dtype), context.cast(weight, dtype)
        bias = None if bias is None else context.cast(bias, dtype)
    if not choice.is_depthwise(slab, weight, settings):
        return None
    result: Tensor = _OwnTransposed.apply(slab, weight, bias, settings)
    return result


class _OwnTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
        ctx.settings, ctx.bias_sizes = settings, None if bias is None else list(bias.shape)
        ctx.save_for_backward(slab, weight)
        return choice.convolve(slab, weight, bias, settings, channels_last=True)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slab, weight = ctx.saved_tensors
        *needed, needs_bias = ctx.needs_input_grad[:3]
        no_bias = needs_bias and vanishes(gradient)
        laid = choice.lay_out_gradient(gradient, weight, ctx.settings, channels_last=True)
        asked = *needed, needs_bias and not no_bias
        of_input, of_weight, of_bias = choice.differentiate(
            laid, slab, weight, ctx.bias_sizes, ctx.settings, channels_last=True, needed=asked
        )
        return of_input, of_weight, sum_vanishing(gradient) if no_bias else of_bias, None
