"""Norms that wait for the activation behind them: statistics now, one pass over memory for both later.

Instance, batch and group norm share one form: statistics of (sample, channel) pairs, averaged over groups of pairs,
then one scale and one shift per pair. One autograd function does all three with the activation, and needs two small
collectives (statistics forward, two sums backward). It keeps the norm's input and nothing else of that size.

The statistics are computed where the norm is called, with scale and shift left to wait (see ``pending``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.layout import DIM, layout_of
from volseg.device.norm import choice
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.parallel.spatial.lazy.recipes import recipe_of_norm
from volseg.parallel.spatial.lazy.statistics import NormStatistics, Pooled, combine_sums
from volseg.parallel.spatial.lazy.vanishing import note_vanishing
from volseg.parallel.spatial.moment import Moment
from volseg.parallel.spatial.pending import Waiting
from volseg.parallel.spatial.recipe import Outline, Recipe, outline_slab
from volseg.parallel.spatial.transport.halo import Halo, Wait, find_needed_room, write_outer_first
from volseg.parallel.spatial.transport.room import allocate_with_room
from volseg.parallel.spatial.versions import Unchanged
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["WaitingNorm", "settle_in_checkpoint", "sum_to_slope"]


def settle_in_checkpoint(volume: ShardedVolume) -> ShardedVolume:
    """Return a norm's result, written where the network's own code checkpoints; leave it waiting elsewhere.

    A norm at the end of a checkpointed block would be computed behind it. The recomputation ends with the last tensor
    that was saved in the block: it would not come as far as torch's, and not change the buffers that torch's changes.
    """
    waiting = volume.pending
    if isinstance(waiting, WaitingNorm) and waiting.moment.hooks not in (None, volume.context.hooks):
        volume.settle()
    return volume


class WaitingNorm(Waiting):
    """A norm, and perhaps an activation, that waits for the next operator.

    Parameters
    ----------
    volume, slabs
        The norm's input, as ``found`` is of it.
    pooled
        Which (sample, channel) pairs share statistics.
    found
        The statistics.
    weight, bias
        Of the channels; None where the norm has none.
    """

    def __init__(
        self,
        volume: ShardedVolume,
        slabs: Sequence[Tensor],
        pooled: Pooled,
        found: NormStatistics,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.context, self.pooled, self.found, self.weight, self.bias = volume.context, pooled, found, weight, bias
        self.stand_ins = slabs = list(slabs)
        self.activation = IDENTITY
        self.slope: Tensor | None = None
        self.moment = Moment([tensor for tensor in (weight, bias) if tensor is not None])
        # The backward pass, where there will be one, reads the weight.
        read = slabs if weight is None or not self.moment.grad_enabled else [*slabs, weight]
        self.unchanged = Unchanged(read)
        communicator = self.context.communicator
        cut_along_depth = volume.dims == (DIM,) and volume.ndim == 5 and communicator.num_shards > 1
        self.room = self.context.room if cut_along_depth and communicator.is_direct else 0

    def activate(self, activation: Activation, slope: Tensor | None = None) -> "WaitingNorm | None":
        """Return this with an activation behind; None where there is one already, or now has another history.

        Parameters
        ----------
        activation, slope
            See ``Pending.activate``.
        """
        if self.activation != IDENTITY or not self.moment.is_now():
            return None
        taken = WaitingNorm.__new__(WaitingNorm)
        vars(taken).update(vars(self), activation=activation, slope=slope)
        if slope is not None:
            taken.moment, taken.unchanged = self.moment.including(slope), self.unchanged.including(slope)
        return taken

    def write(self, halos: Sequence[Halo]) -> tuple[list[Tensor], Recipe | None, Wait | None]:
        """Apply it."""
        work = _Writing(self, halos)
        slabs = self._run(work)
        return slabs, self._describe(work) if self.context.communicator.is_direct else None, work.wait

    def outline(self) -> Outline | None:
        """Note it for the backward pass."""
        if not self.context.communicator.is_direct:
            return None
        work = _Writing(self, (), outline=True)
        return Outline(self._run(work), self._describe(work), layout_of(self.stand_ins[0]))

    def _run(self, work: "_Writing") -> list[Tensor]:
        with self.moment.restored():
            return list(_Normalize.apply(work, self.weight, self.bias, *work.slopes, *self.stand_ins))

    def _describe(self, work: "_Writing") -> Recipe:
        slopes = [slope.detach() for slope in work.slopes]
        return recipe_of_norm(self.stand_ins, work.scales, work.shifts, self.activation, slopes)


class _Writing:
    """A norm while its slabs are written, and what comes out besides them."""

    def __init__(self, norm: WaitingNorm, halos: Sequence[Halo], outline: bool = False) -> None:
        self.norm, self.halos, self.outline = norm, halos, outline
        self.scales, self.shifts = norm.context.spread(norm.found.scale), norm.context.spread(norm.found.shift)
        with norm.moment.restored():  # whose gradient is summed, even if it was frozen since
            self.slopes: list[Tensor] = [] if norm.slope is None else norm.context.spread(norm.slope)
        self.wait: Wait | None = None

    def write(self, slabs: Sequence[Tensor]) -> list[Tensor]:
        """Apply scale, shift and activation; with halos to send, to the outermost planes first."""
        room = find_needed_room(self.norm.room, self.halos)
        if self.outline:
            return [outline_slab(slab.shape, slab.dtype, slab.device) for slab in slabs]
        slopes: Sequence[Tensor | None] = self.slopes or [None] * len(slabs)
        rows = zip(self.scales, self.shifts, slopes, strict=True)
        applied = [
            partial(choice.affine, scale=scale, shift=shift, activation=self.norm.activation, slope=slope)
            for scale, shift, slope in rows
        ]
        if not room:
            return [apply(slab) for apply, slab in zip(applied, slabs, strict=True)]
        outs = [allocate_with_room(slab, room) for slab in slabs]

        def planes(number: int, start: int, count: int) -> None:
            slab, out = (given[number].narrow(DIM, start, count) for given in (slabs, outs))
            applied[number](slab, out=out)

        def ends(number: int, front: int, back: int) -> None:
            applied[number](slabs[number], out=outs[number], ends=(front, back))

        self.wait = write_outer_first(outs, room, self.halos, planes, ends)
        return outs


class _Normalize(torch.autograd.Function):
    """Gets weight and bias, then a slope for each slab where the activation has one, then the slabs."""

    @staticmethod
    def forward(
        ctx: Any, work: _Writing, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        norm, found = work.norm, work.norm.found
        slopes, slabs = tensors[: len(work.slopes)], tensors[len(work.slopes) :]
        results = tuple(work.write(slabs))
        ctx.plan = norm.context, norm.pooled, found.voxels, bias is not None, norm.activation, norm.room
        ctx.num_slopes = len(slopes)
        ctx.save_for_backward(found.mean, found.rstd, weight, found.scale, found.shift, *slopes, *slabs)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, pooled, voxels, has_bias, activation, room = ctx.plan
        mean, rstd, weight, scale, shift, *tensors = ctx.saved_tensors
        spread, number = context.spread, ctx.num_slopes
        slabs = tensors[number:]
        slopes = tensors[:number] or [None] * len(slabs)
        scales, shifts = spread(scale), spread(shift)
        rows = zip(gradients, slabs, spread(mean), scales, shifts, strict=True)
        sums = [choice.gradient_sums_of_parts(*row, activation, slope) for row, slope in zip(rows, slopes, strict=True)]
        found = combine_sums(context, pooled, sums, mean, rstd, weight, voxels, slabs)
        offsets = spread(found.offset)
        rows = zip(gradients, slabs, scales, shifts, spread(found.factor), offsets, strict=True)
        # The convolution in front of the norm wants neighbours' planes around its gradient.
        roomy = room if mean.shape[0] == 1 else 0
        inputs = [
            choice.gradient_input(
                *row, activation, out=allocate_with_room(row[1], roomy) if roomy else None, slope=slope
            )
            for row, slope in zip(rows, slopes, strict=True)
        ]
        if pooled.ignores_channels(*mean.shape):
            for gradient, own in zip(inputs, offsets, strict=True):
                note_vanishing(gradient, own)
        weight_gradient = found.weight.to(weight) if weight is not None else None
        bias_gradient = found.bias.to(rstd if weight is None else weight) if has_bias else None
        of_slopes = [sum_to_slope(own, slope) for own, slope in zip(sums, tensors[:number], strict=False)]
        return None, weight_gradient, bias_gradient, *of_slopes, *inputs


def sum_to_slope(sums: Tensor, slope: Tensor) -> Tensor:
    """Return PReLU's gradient from the sums of a slab's parts, ``(parts, 3, B, C)``."""
    third = sums[:, 2]
    total = third.sum() if slope.numel() == 1 else third.flatten(0, -2).sum(0)
    return total.to(slope.dtype).reshape(slope.shape)
