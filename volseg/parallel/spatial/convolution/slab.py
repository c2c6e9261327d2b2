"""Convolve this process's slabs: halos are received in place during other work, and the input is kept as a recipe.

``plan`` decides between this module and the general exchange. Each slab is treated like the only slab of a process:
with several slabs, every step is taken for all of them before the next step.

Forward: the halo travels while the slab's inner planes are still being normalised. Backward: planes travel while the
input is recomputed and the weights' gradient is computed. If outputs and inputs are cut in the same way (stride 1),
the halo of the output's gradient travels, and the input's gradient is computed only for the slab's own planes: one more
plane is a tenth more work at a coarse level of ten planes, and half an empty wave of blocks. The same holds for a
transposed convolution, which computes its weights' gradient from the same planes: its input is coarse, and kept. In
other cases the gradient of the halo travels back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from volseg.device.convolution import choice
from volseg.device.first_order import first_order
from volseg.device.layout import DIM, layout_of
from volseg.device.torch_internals import get_storage_key
from volseg.parallel.spatial.convolution.around import SurroundedGradients
from volseg.parallel.spatial.convolution.plan import ConvolutionPlan
from volseg.parallel.spatial.convolution.tiles import convolve_by_tiles
from volseg.parallel.spatial.lazy.bias import add_bias_later, may_wait, sum_vanishing, vanishes
from volseg.parallel.spatial.lazy.recipes import Join
from volseg.parallel.spatial.sources import Asked, Recipe, Write, mask_asked, split_rows
from volseg.parallel.spatial.transport.halo import Wait, copy_halo, put_halo_back, return_gradients, start_filling
from volseg.parallel.spatial.transport.pieces import extend, get_halo_room, own_planes
from volseg.parallel.spatial.volume import ShardedVolume

Gradients: TypeAlias = Sequence[Tensor | None]
"""Gradients of the input's own planes, of the weight and of the bias; None if not needed."""


def convolve(volume: ShardedVolume, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan) -> ShardedVolume:
    """Convolve the slabs of this process."""
    context = volume.context
    by_tiles = convolve_by_tiles(volume, weight, bias, plan) if plan.tiles > 1 else None
    if by_tiles is not None:
        return by_tiles
    wait = volume.settle(plan.halos) if plan.halos else None
    transposed = plan.settings.transposed
    slabs = volume.slabs if transposed else volume.pending.lend(volume)
    dtype, weights, biases = context.spread_for(slabs[0], weight, bias)
    pending = volume.pending
    recipe = None if transposed else pending.find_recipe(volume)
    room = get_halo_room(slabs[0]) if plan.halos else 0
    if slabs[0].dtype != dtype:
        slabs = [slab.to(dtype) for slab in slabs]
        recipe, room = None, 0
        if wait is not None:  # sent in the wrong dtype, but sent: complete it, and send again
            wait()
        wait = None
    # The parts of a join themselves: each part gets its own gradient, which need not be cut out of the join's.
    columns = [slabs]
    if recipe is not None and pending.parts is not None:
        columns, volume.is_bypassed = pending.parts, True
    channels = weight.shape[1] * plan.settings.groups if transposed else len(weight)
    waits = may_wait(bias, weight, slabs[0], channels)
    waits = waits and not choice.adds_bias(slabs[0], weights[0], plan.settings, plan.channels_last)
    work = _Input([slab.detach() for slab in slabs], plan, recipe, room, wait, len(biases), waits)
    results = _Convolve.apply(work, *weights, *biases, *chain.from_iterable(columns))
    work.slabs = []
    volume.pending.release(volume)  # with a recipe: the input is kept as recipe, or as a cast
    shape = list(results[0].shape)
    shape[volume.dims[0]] = plan.outputs
    result = ShardedVolume(results, volume.dims, shape, context)
    return add_bias_later(result, biases) if waits else result


@dataclass
class _Input:
    """Input of a convolution besides tensors that autograd knows: slabs, recipe, room and halos.

    Attributes
    ----------
    leaves_biases
        Whether another operator adds the biases.
    """

    slabs: list[Tensor]
    plan: ConvolutionPlan
    recipe: Recipe | None
    room: int
    wait: Wait | None
    num_biases: int
    leaves_biases: bool

    def surround(self, slabs: Sequence[Tensor]) -> list[Tensor]:
        """Return the slabs between the planes of their halos, once these have arrived."""
        halos = self.plan.halos
        buffers = [extend(slab, self.room, halo.own) for slab, halo in zip(slabs, halos, strict=True)]
        wait = start_filling(buffers, halos) if self.wait is None else self.wait
        wait()
        return buffers

    def choose_added(self, biases: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the bias that is added to each slab's result, or None."""
        return biases if biases and not self.leaves_biases else [None] * len(self.slabs)


class _Convolve(torch.autograd.Function):
    """Function of a weight for each slab, a bias for each slab if any, and the slabs of each joined volume."""

    @staticmethod
    def forward(ctx: Any, given: _Input, *tensors: Tensor) -> tuple[Tensor, ...]:
        plan, halos, recipe, count = given.plan, given.plan.halos, given.recipe, len(given.slabs)
        weights, biases = tensors[:count], tensors[count : count + given.num_biases]
        parts = tensors[count + given.num_biases :]
        # The inputs themselves if they are kept: autograd must know the tensors that it saves.
        slabs = given.slabs if recipe is not None else list(parts)
        buffers = given.surround(slabs) if halos else slabs
        rows = zip(buffers, weights, given.choose_added(biases), strict=True)
        results = tuple(choice.convolve(*row, plan.settings, plan.channels_last) for row in rows)
        if plan.owed:
            buffers = slabs  # those of a transposed convolution are coarse, and kept without their halo
            # Autograd refuses in-place changes of a function's output that is a view.
            results = tuple(own.narrow(DIM, 0, planes).detach() for own, planes in zip(results, plan.owed, strict=True))
        # Not the recipe's tensors: autograd keeps these, or saved-tensor hooks do.
        ctx.plan, ctx.write = plan, None if recipe is None else recipe.write
        ctx.count, ctx.num_biases = count, given.num_biases
        ctx.bias_sizes = list(biases[0].shape) if biases else None
        ctx.channels = [part.shape[1] for part in parts[::count]]
        if recipe is None:
            # A buffer around a slab in the slab's memory has its own versions: only the slab's count in-place changes.
            shared = [slab for slab, buffer in zip(slabs, buffers, strict=True) if _share_memory(slab, buffer)]
            ctx.save_for_backward(*weights, *buffers, *shared)
        else:
            ctx.likes = [(buffer.shape, buffer.dtype, layout_of(buffer)) for buffer in buffers]
            sizes = [halo.own for halo in halos] or [(0, 0)] * count  # planes before and behind each slab
            borders = [copy_halo(*pair) for pair in zip(buffers, sizes, strict=True)]
            # For each slab: copies of its halo, then the recipe's tensors.
            kept = list(chain.from_iterable(zip(borders, recipe.rows, strict=True)))
            ctx.sizes = [len(own) for own in kept]
            ctx.save_for_backward(*weights, *chain.from_iterable(kept))
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them for each access
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        pairs = zip(gradients, weights, strict=True)
        laid = [choice.lay_out_gradient(*pair, ctx.plan.settings, ctx.plan.channels_last) for pair in pairs]
        asked = Asked.of(ctx, ctx.count)
        no_biases = asked.bias and all(map(vanishes, gradients))
        asked = asked._replace(bias=asked.bias and not no_biases)
        rows = [] if ctx.write is None else split_rows(kept, ctx.sizes)
        pairs_kept = list(zip(rows[::2], rows[1::2], strict=True))
        # A join of joins has more parts than inputs.
        joined = isinstance(ctx.write, Join) and len(ctx.write.channels) == len(ctx.channels)
        if ctx.plan.owed:
            found = _derive_transposed(ctx, laid, weights, kept, asked)
        elif ctx.plan.in_parts and joined and ctx.plan.settings.groups == 1:
            found = _derive_in_parts(ctx, laid, weights, pairs_kept, asked._replace(input=True))
        else:
            # Planes travel while the input is recomputed, and arrive before the weights' gradient begins: its blocks
            # fill the GPU exactly once, and blocks that find a processor busy with the exchange crowd the others.
            derive = _Derivation(ctx, laid, asked.input)
            buffers = list(kept[: ctx.count])
            if ctx.write is not None:
                buffers = [_write_input(ctx, n, ctx.write, *own, sum(ctx.channels)) for n, own in enumerate(pairs_kept)]
            whole = derive(buffers, weights, asked)
            found = [([None] * len(ctx.channels) if x is None else x.split(ctx.channels, 1), w, b) for x, w, b in whole]
        inputs = list(chain.from_iterable(zip(*(split for split, _, _ in found), strict=True)))
        biases = [bias for _, _, bias in found] if ctx.num_biases else []
        if no_biases:
            biases = list(map(sum_vanishing, gradients))
        return None, *(weight for _, weight, _ in found), *biases, *mask_asked(ctx, inputs)


def _share_memory(slab: Tensor, buffer: Tensor) -> bool:
    return buffer is not slab and get_storage_key(buffer.untyped_storage()) == get_storage_key(slab.untyped_storage())


class _Derivation:
    """A convolution's gradients, computed while planes travel to and from the neighbours.

    Created once for the gradients of the slabs' outputs, and called for each part of the input.
    """

    def __init__(self, ctx: Any, gradients: Sequence[Tensor], needs_input: bool) -> None:
        self.ctx, self.gradients, self.halos = ctx, gradients, ctx.plan.halos
        plan, self.around = ctx.plan, None
        if needs_input and plan.around is not None:
            self.around = SurroundedGradients(plan.around, gradients, plan.channels_last)

    def __call__(self, buffers: Sequence[Tensor], weights: Sequence[Tensor], asked: Asked) -> list[Gradients]:
        """Return the wanted gradients of each slab: of input, weight and bias."""
        plan = self.ctx.plan
        derive = [
            partial(choice.differentiate, *row, self.ctx.bias_sizes, plan.settings, plan.channels_last)
            for row in zip(self.gradients, buffers, weights, strict=True)
        ]
        if not self.halos:
            return [of_slab(asked) for of_slab in derive]
        finish: Callable[[], Sequence[Tensor | None]] | None = None
        if asked.input and self.around is not None:
            slabs = [own_planes(buffer, halo.own) for buffer, halo in zip(buffers, self.halos, strict=True)]
            finish = partial(self.around.differentiate_inputs, slabs, weights)
        elif asked.input:
            whole = [of_slab((True, False, False))[0] for of_slab in derive]
            finish = return_gradients([gradient for gradient in whole if gradient is not None], self.halos)
        rest = [of_slab(asked._replace(input=False)) for of_slab in derive]
        inputs = [None] * len(rest) if finish is None else finish()
        return [(own, weight, bias) for own, (_, weight, bias) in zip(inputs, rest, strict=True)]


Found = list[tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]]
"""For each slab: the gradients of the inputs that are joined in it, of the weight and of the bias."""


def _derive_transposed(
    ctx: Any, gradients: Sequence[Tensor], weights: Sequence[Tensor], slabs: Sequence[Tensor], asked: Asked
) -> Found:
    """Return the gradients of a transposed convolution."""
    found: Sequence[Gradients] = [(None, None)] * ctx.count
    if asked.input or asked.weight:
        around = SurroundedGradients(ctx.plan.around, gradients, ctx.plan.channels_last)
        found = around.differentiate(slabs, weights, asked.input, asked.weight)
    others = (0, *range(DIM, gradients[0].ndim))
    biases = [own.sum(others) if asked.bias else None for own in gradients]
    return [([own], weight, bias) for (own, weight), bias in zip(found, biases, strict=True)]


Kept = Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]
"""For each slab: copies of its halo, and the tensors from which the slab is written."""


def _derive_in_parts(
    ctx: Any, gradients: Sequence[Tensor], weights: Sequence[Tensor], kept: Kept, asked: Asked
) -> Found:
    """Return the gradients of a convolution of joined channels.

    The inputs are taken one after the other. Neither the join nor its gradient is materialized: they are half of the
    memory of a level's way up.
    """
    layouts = [layout_of(gradient) for gradient in gradients]
    by_part: list[list[Gradients]] = []
    derive = _Derivation(ctx, gradients, needs_input=True)
    for pieces in zip(*(ctx.write.parts(tensors) for _, tensors in kept), strict=True):
        buffers = []
        for number, ((borders, _), (write, own, (first, count))) in enumerate(zip(kept, pieces, strict=True)):
            edges = [border.narrow(1, first, count) for border in borders]
            buffers.append(_write_input(ctx, number, write, edges, own, count))
        _, _, (first, count) = pieces[0]
        narrow = [
            weight.narrow(1, first, count).contiguous(memory_format=layout)
            for weight, layout in zip(weights, layouts, strict=True)
        ]
        by_part.append(derive(buffers, narrow, asked._replace(bias=asked.bias and first == 0)))
    found: Found = []
    for of_slab in zip(*by_part, strict=True):
        inputs, parts_of_weight, biases = zip(*of_slab, strict=True)
        whole = torch.cat([part for part in parts_of_weight if part is not None], 1) if asked.weight else None
        found.append((inputs, whole, biases[0]))
    return found


def _write_input(
    ctx: Any, number: int, write: Write, borders: Sequence[Tensor], tensors: Sequence[Tensor], channels: int
) -> Tensor:
    """Write a convolution's input, or some channels of it, between the planes of its halo.

    Parameters
    ----------
    ctx
        Context of the convolution's autograd node.
    number
        Number of the slab.
    write, tensors
        Function that writes the slab, and its tensors.
    borders
        The halo in the form of ``copy_halo``.
    channels
        Number of channels to write.
    """
    shape, dtype, layout = ctx.likes[number]
    shape = shape[0], channels, *shape[2:]
    buffer = torch.empty(shape, dtype=dtype, device=tensors[0].device, memory_format=layout)
    if not ctx.plan.halos:
        write(tensors, buffer, 0)
        return buffer
    own = ctx.plan.halos[number].own
    put_halo_back(buffer, own, borders)
    write(tensors, own_planes(buffer, own), 0)
    return buffer
