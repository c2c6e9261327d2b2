"""A transposed convolution of a slab by kernels of our own, where there are some: each channel by itself."""

from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution import choice, depthwise, rules
from volseg.device.convolution.settings import Settings
from volseg.device.first_order import first_order
from volseg.parallel.spatial.context import Context, find_autocast
from volseg.parallel.spatial.lazy.vanishing import sum_vanishing, vanishes

__all__ = ["convolve_transposed"]


def convolve_transposed(
    context: Context, slab: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> Tensor | None:
    """Return the transposed convolution of a slab with channels last, or None where torch is to compute it."""
    if not (context.channels_last and depthwise.fits(weight.shape, settings)):
        return None
    dtype = find_autocast(slab)
    if dtype is not None and slab.dtype != torch.float64:
        slab, weight = slab.to(dtype), context.cast(weight, dtype)
        bias = None if bias is None else context.cast(bias, dtype)
    if not rules.is_depthwise(slab, weight, settings):
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
