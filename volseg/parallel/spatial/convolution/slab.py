"""Convolution of this process's one slab: halo received in place while other work goes on, input kept as a recipe.

It takes over from the general exchange where ``plan`` says so.

Forward: the halo travels while the slab's inner planes are still being normalised. Backward, something travels while
the input is computed again and the weights' gradient is computed. Where outputs and inputs are cut alike (stride 1) it
is the halo of the output's gradient, and the input's gradient is computed for the slab's own planes alone: a plane more
is a tenth more work where a coarse level has ten, and half an empty wave of blocks. Elsewhere the gradient of the halo
travels back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, layout_of
from volseg.parallel.spatial.convolution.plan import ConvolutionPlan
from volseg.parallel.spatial.lazy.recipes import Join
from volseg.parallel.spatial.pending import Recipe, Write
from volseg.parallel.spatial.transport import kept_halo
from volseg.parallel.spatial.transport.halo import Wait, return_gradient, start_filling
from volseg.parallel.spatial.transport.room import extend, find_room, own_planes
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["convolve"]


def convolve(volume: ShardedVolume, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> ShardedVolume:
    """Convolve the slab of this process."""
    context = volume.context
    wait = None if plan.halo is None else volume.settle(plan.halo)
    (slab,) = volume.pending.lend(volume)
    (weight,) = context.spread(weight)
    bias = None if bias is None else context.spread(bias)[0]
    pending = volume.pending
    recipe, room = pending.find_recipe(volume), 0 if plan.halo is None else find_room(slab)
    kind = slab.device.type
    if torch.is_autocast_enabled(kind) and slab.is_floating_point() and slab.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        if slab.dtype != dtype:
            slab, recipe, room = slab.to(dtype), None, 0
            if wait is not None:  # sent in the wrong dtype, but sent: complete it, and send again
                wait()
            wait = None
        weight, bias = context.cast(weight, dtype), None if bias is None else context.cast(bias, dtype)
    # A join's parts themselves: each gets its gradient by itself, and nobody cuts it out of the join's.
    parts = [slab]
    if recipe is not None and pending.parts is not None:
        parts, volume.is_bypassed = pending.parts, True
    work = _Input(slab.detach(), plan, recipe, room, wait)
    result = _Convolve.apply(work, weight, bias, *parts)
    work.slab = None
    if recipe is not None:
        volume.pending.release(volume)
    shape = list(result.shape)
    shape[volume.dims[0]] = plan.outputs
    return ShardedVolume([result], volume.dims, shape, context)


@dataclass
class _Input:
    """What a convolution reads, besides what autograd knows: the slab, how to compute it again, its room and halo."""

    slab: Tensor | None
    plan: ConvolutionPlan
    recipe: Recipe | None
    room: int
    wait: Wait | None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: _Input, weight: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        plan, halo, recipe = given.plan, given.plan.halo, given.recipe
        # The input itself where it is kept: what autograd saves must be known to it.
        slab = given.slab if recipe is not None else parts[0]
        assert slab is not None
        buffer, borders = slab, None
        if halo is not None:
            buffer = extend(slab, given.room, halo.own)
            borders = (start_filling(buffer, halo, keep=recipe is not None) if given.wait is None else given.wait)()
        result = choice.convolve(buffer, weight, bias, plan.settings, plan.channels_last)
        # Not the recipe's tensors: autograd keeps them, or whoever watches what it keeps.
        ctx.plan, ctx.write = plan, None if recipe is None else recipe.write
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.channels = [part.shape[1] for part in parts]
        if recipe is None:
            # Around a slab in its own memory the buffer has versions of its own: the slab's tell what changed in place.
            shared = buffer is not slab and buffer.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
            ctx.save_for_backward(weight, buffer, *([slab] if shared else []))
        else:
            ctx.like = buffer.shape, buffer.dtype, layout_of(buffer)
            if borders is None:
                borders = [] if halo is None else kept_halo.copy_planes(buffer, halo.own)
            ctx.num_borders = len(borders)
            ctx.save_for_backward(weight, *borders, *recipe.tensors)
        return result

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        gradient = choice.lay_out_gradient(gradient, weight, ctx.plan.settings, ctx.plan.channels_last)
        needs_input, (needs_weight, needs_bias) = any(ctx.needs_input_grad[3:]), ctx.needs_input_grad[1:3]
        if ctx.plan.in_parts and _can_derive_in_parts(ctx):
            return None, *_derive_in_parts(ctx, gradient, weight, kept)
        # Planes travel while the input is computed again, and are there before the weights' gradient begins: its blocks
        # fill the GPU exactly once, and those that find a processor taken by the exchange crowd the others.
        derive = _Gradients(ctx, gradient, needs_input)
        if ctx.write is None:
            buffer = kept[0]
        else:
            borders, tensors = kept[: ctx.num_borders], kept[ctx.num_borders :]
            buffer = _write_input(ctx, ctx.write, tensors, borders, sum(ctx.channels))
        joined, weight_gradient, bias_gradient = derive(buffer, weight, needs_input, needs_weight, needs_bias)
        inputs = [None] * len(ctx.channels) if joined is None else joined.split(ctx.channels, 1)
        return None, weight_gradient, bias_gradient, *inputs


class _Gradients:
    """A convolution's gradients, computed while planes travel to and from the neighbours.

    Made once for a gradient of the output, called for each part of the input.
    """

    def __init__(self, ctx: Any, gradient: Tensor, needs_input: bool) -> None:
        self.ctx, self.gradient, self.halo = ctx, gradient, ctx.plan.halo
        self.around: Tensor | None = None
        if self.halo is not None and ctx.plan.alike and needs_input:
            self.around = extend(gradient, find_room(gradient), self.halo.own)
            self.wait: Wait | None = start_filling(self.around, self.halo)

    def __call__(
        self, buffer: Tensor, weight: Tensor, needs_input: bool, needs_weight: bool, needs_bias: bool
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the input's own planes, of the weight and of the bias, None where not needed."""
        plan, bias_sizes = self.ctx.plan, self.ctx.bias_sizes
        derive = partial(
            choice.differentiate, self.gradient, buffer, weight, bias_sizes, plan.settings, plan.channels_last
        )
        if self.halo is None:
            return derive((needs_input, needs_weight, needs_bias))
        finish: Callable[[], Tensor] | None = None
        if needs_input and self.around is not None:
            finish = partial(self._of_own_planes, buffer, weight)
        elif needs_input:
            whole = derive((True, False, False))[0]
            assert whole is not None
            finish = return_gradient(whole, self.halo)
        _, weight_gradient, bias_gradient = derive((False, needs_weight, needs_bias))
        return None if finish is None else finish(), weight_gradient, bias_gradient

    def _of_own_planes(self, buffer: Tensor, weight: Tensor) -> Tensor:
        assert self.around is not None
        if self.wait is not None:  # for the first part
            self.wait()
            self.wait = None
        settings = self.ctx.plan.settings
        wide = replace(settings, padding=(weight.shape[DIM] - 1, *settings.padding[1:]))
        slab, only_input = own_planes(buffer, self.halo.own), (True, False, False)
        found = choice.differentiate(self.around, slab, weight, None, wide, self.ctx.plan.channels_last, only_input)[0]
        assert found is not None
        return found


def _can_derive_in_parts(ctx: Any) -> bool:
    settings, write = ctx.plan.settings, ctx.write
    # A join of joins has more parts than inputs.
    return (
        isinstance(write, Join)
        and len(write.channels) == len(ctx.channels)
        and not settings.transposed
        and settings.groups == 1
    )


def _derive_in_parts(ctx: Any, gradient: Tensor, weight: Tensor, kept: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """Yield the gradients of weight, bias and inputs of a convolution of joined channels, one input after the other.

    Neither the join nor its gradient comes into being: half of what a level's way up takes.
    """
    layout = layout_of(gradient)
    weights: list[Tensor | None] = []
    inputs: list[Tensor | None] = []
    bias_gradient = None
    derive = _Gradients(ctx, gradient, needs_input=True)
    borders, tensors = kept[: ctx.num_borders], kept[ctx.num_borders :]
    for write, own, (first, count) in ctx.write.parts(tensors):
        buffer = _write_input(ctx, write, own, [border.narrow(1, first, count) for border in borders], count)
        part = weight.narrow(1, first, count).contiguous(memory_format=layout)
        needs = first == 0 and ctx.needs_input_grad[2]
        found, weight_gradient, bias_found = derive(buffer, part, True, ctx.needs_input_grad[1], needs)
        inputs.append(found)
        weights.append(weight_gradient)
        bias_gradient = bias_found if first == 0 else bias_gradient
    yield torch.cat([w for w in weights if w is not None], 1) if ctx.needs_input_grad[1] else None
    yield bias_gradient
    for needed, value in zip(ctx.needs_input_grad[3:], inputs, strict=True):
        yield value if needed else None


def _write_input(ctx: Any, write: Write, tensors: Sequence[Tensor], borders: Sequence[Tensor], channels: int) -> Tensor:
    """Write a convolution's input, or some channels of it, between the planes of its halo.

    Parameters
    ----------
    ctx
        Of the convolution.
    write, tensors
        What writes the slab, and from what.
    borders
        The halo as ``kept_halo`` has it.
    channels
        Number of channels to write.
    """
    shape, dtype, layout = ctx.like
    shape = shape[0], channels, *shape[2:]
    buffer = torch.empty(shape, dtype=dtype, device=tensors[0].device, memory_format=layout)
    if ctx.plan.halo is None:
        write(tensors, buffer, 0)
        return buffer
    kept_halo.put_back(buffer, ctx.plan.halo.own, borders)
    write(tensors, own_planes(buffer, ctx.plan.halo.own), 0)
    return buffer
