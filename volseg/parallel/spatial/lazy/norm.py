"""Norms that wait for the activation behind them: statistics now, one pass over memory for both later.

Instance, batch and group norm share one form: statistics of (sample, channel) pairs, averaged over groups of pairs,
then one scale and one shift per pair. One autograd function does all three with the activation, and needs two small
collectives (statistics forward, two sums backward). It keeps the norm's input and nothing else of that size.

The next operator decides what is computed: an activation is taken along, a convolution gets its halo sent while the
inner planes are still being written, anything else gets the slabs. What is deferred is computed before any tensor is
changed in place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from volseg.device.dims import DIM
from volseg.device.first_order import first_order
from volseg.device.norm import choice
from volseg.device.peer.values import CAPACITY
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import Context, saved_tensors_hooks
from volseg.parallel.spatial.lazy.recipes import Recipe, normalized
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.transport.halo import Halo, Wait, roomy, write_outer_first
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["Deferred", "Moment", "Pooled", "Statistics", "settled_in_checkpoint", "statistics"]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Which (sample, channel) pairs share statistics: all samples (batch norm), or each of ``groups`` of channels."""

    over_batch: bool
    groups: int | None = None

    def needed(self, batch: int) -> Callable[[Tensor], Tensor] | None:
        """Return ``average``, or None where every pair is its own group."""
        alone = batch == 1 if self.over_batch else self.groups is None
        return None if alone else self.average

    def average(self, pairs: Tensor) -> Tensor:
        """Replace each entry of ``(B, C)`` by the mean of its group."""
        if self.over_batch:
            return pairs.mean(0, keepdim=True).expand_as(pairs)
        if self.groups is None:
            return pairs
        split = pairs.unflatten(1, (self.groups, -1))
        return split.mean(-1, keepdim=True).expand_as(split).flatten(1)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a norm computes from its input, ``(B, C)`` on the home device, and the number of voxels of a channel."""

    mean: Tensor
    variance: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor
    voxels: int


@lru_cache(maxsize=1024)
def slab_voxels(grid: tuple[int, ...], dims: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Return the number of voxels of every shard's slab, in the order of the grid."""
    counts = [prod(size for dim, size in enumerate(shape) if dim >= 2 and dim not in dims)]
    for dim, shards in zip(dims, grid, strict=True):
        counts = [count * (stop - start) for count in counts for start, stop in spans(shape[dim], shards)]
    return tuple(counts)


def statistics(
    volume: ShardedVolume, pooled: Pooled, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Statistics:
    """Compute and combine the slabs' statistics."""
    context = volume.context
    counts = slab_voxels(context.communicator.grid, volume.dims, volume.shape)
    with torch.no_grad():  # the gradient through the statistics is part of the norm's own
        if _direct(context, pooled, volume.slabs):
            (slab,) = volume.slabs
            shares = choice.shares(counts, torch.float32, slab.device)
            found = choice.direct_coefficients(slab, shares, weight, bias, eps, context.communicator.mailbox)
        else:
            stacked = context.communicator.collect([choice.moments(slab) for slab in volume.slabs])  # (shards, 2, B, C)
            shares = choice.shares(counts, stacked.dtype, stacked.device)
            found = choice.coefficients(stacked, shares, weight, bias, eps, pooled.needed(volume.shape[0]))
    mean, variance, rstd, scale, shift = found.unbind(0)
    return Statistics(mean, variance, rstd, scale, shift, sum(counts))


def _direct(context: Context, pooled: Pooled, slabs: Sequence[Tensor]) -> bool:
    """Say whether one kernel exchanges statistics and computes what follows from them."""
    communicator = context.communicator
    batch, channels = slabs[0].shape[:2]
    reached = communicator.shards == 1 or (communicator.mailbox is not None and 2 * batch * channels <= CAPACITY)
    return reached and len(slabs) == 1 and pooled.needed(batch) is None and choice.fused(slabs[0])


def settled_in_checkpoint(volume: ShardedVolume) -> ShardedVolume:
    """Return a volume whose norm is computed, where the network's own code checkpoints; leave it deferred elsewhere.

    A norm at the end of a checkpointed block would be computed behind it. The recomputation ends with the last tensor
    that was saved in the block: it would not come as far as torch's, and not change the buffers that torch's changes.
    """
    deferred: Any = volume.deferred
    if deferred is not None and deferred.moment.hooks not in (None, volume.context.hooks):
        volume.settle()
    return volume


class Moment:
    """When something was deferred: the modes it must be computed in, and the state its inputs must be in."""

    def __init__(self) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.hooks = saved_tensors_hooks()
        self.versions: list[int] | None = None
        self.trained: list[bool] = []

    def note(self, slabs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> None:
        """Remember the inputs' versions, and which parameters were trained, the first time."""
        if self.versions is None:
            self.versions = [slab._version for slab in slabs]
            self.trained = [parameter.requires_grad for parameter in parameters]

    def check(self, slabs: Sequence[Tensor]) -> None:
        """Refuse inputs that were changed in place since."""
        if [slab._version for slab in slabs] != self.versions:
            raise UnsupportedOperatorError(
                "the input of a norm or of a join, or the norm's weight, was changed in place before the result was "
                "used; do that out of place, or use the result before"
            )

    def restored(self, parameters: Sequence[Tensor] = ()) -> AbstractContextManager[None]:
        """Compute as if then.

        The next operator may run under no_grad, or inside a checkpointed block that must not count this; or a parameter
        was frozen, or freed, in between.
        """
        now = saved_tensors_hooks()
        own = now is None or now == self.hooks
        changed = [p for p, trained in zip(parameters, self.trained, strict=True) if p.requires_grad != trained]
        if own and not changed and torch.is_grad_enabled() == self.grad_enabled:
            return nullcontext()
        return self._restored(own, changed)

    @contextmanager
    def _restored(self, own: bool, changed: Sequence[Tensor]) -> Iterator[None]:
        hooks = nullcontext() if own else torch.autograd.graph.saved_tensors_hooks(_same, _same)
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        try:
            with torch.set_grad_enabled(self.grad_enabled), hooks:
                yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Deferred:
    """A norm, and perhaps an activation, to be applied to ``slabs``."""

    context: Context
    dims: tuple[int, ...]
    slabs: list[Tensor]
    pooled: Pooled
    found: Statistics
    weight: Tensor | None
    bias: Tensor | None
    activation: choice.Activation = choice.IDENTITY
    moment: Moment = field(default_factory=Moment)

    def __post_init__(self) -> None:
        self.moment.note(self._inputs, self._affine)

    @property
    def _affine(self) -> list[Tensor]:
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]

    @property
    def _inputs(self) -> list[Tensor]:
        """What must still be as it was; the weight, which the backward pass reads, only where there will be one."""
        return self.slabs if self.weight is None or not self.moment.grad_enabled else [*self.slabs, self.weight]

    def activated(self, activation: choice.Activation) -> "Deferred | None":
        """Return this with an activation behind, or None where there is one already."""
        if self.activation != choice.IDENTITY:
            return None
        given = self.context, self.dims, self.slabs, self.pooled, self.found, self.weight, self.bias
        return Deferred(*given, activation, self.moment)

    @property
    def room(self) -> int:
        """Planes of room to leave around the result."""
        single = len(self.slabs) == 1 and self.context.communicator.shards > 1
        return self.context.room if single and self.dims == (DIM,) and self.slabs[0].ndim == 5 else 0

    def run(self, halo: Halo | None) -> tuple[list[Tensor], Recipe | None, int, Wait | None]:
        """Apply it: return the slabs, the first one's recipe, their room, and the wait for the halo if one was sent."""
        self.moment.check(self._inputs)
        work = _Work(self, halo if halo is not None and halo.width <= self.room else None)
        with self.moment.restored(self._affine):
            results = _Normalize.apply(work, self.weight, self.bias, *self.slabs)
        recipe = None
        if len(self.slabs) == 1:
            recipe = normalized(self.slabs[0], work.scales[0], work.shifts[0], self.activation)
        return list(results), recipe, self.room, work.wait


@dataclass
class _Work:
    """A deferred norm while it is computed, and what comes out besides the slabs."""

    norm: Deferred
    halo: Halo | None
    scales: list[Tensor] = field(default_factory=list)
    shifts: list[Tensor] = field(default_factory=list)
    wait: Wait | None = None

    def write(self, slab: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Apply scale, shift and activation; with a halo to send, to the outermost planes first."""
        room = self.norm.room
        apply = partial(choice.affine, scale=scale, shift=shift, activation=self.norm.activation)
        if not room:
            return apply(slab)
        out = roomy(slab, room)

        def planes(start: int, count: int) -> None:
            apply(slab.narrow(DIM, start, count), out=out.narrow(DIM, start, count))

        def ends(front: int, back: int) -> None:
            apply(slab, out=out, ends=(front, back))

        self.wait = write_outer_first(out, room, self.halo, planes, ends)
        return out


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: _Work, weight: Tensor | None, bias: Tensor | None, *slabs: Tensor
    ) -> tuple[Tensor, ...]:
        norm, found = work.norm, work.norm.found
        spread = norm.context.spread
        work.scales, work.shifts = spread(found.scale), spread(found.shift)
        results = tuple(work.write(*row) for row in zip(slabs, work.scales, work.shifts, strict=True))
        ctx.plan = norm.context, norm.pooled, found.voxels, bias is not None, norm.activation, norm.room
        ctx.save_for_backward(found.mean, found.rstd, weight, found.scale, found.shift, *slabs)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, pooled, voxels, has_bias, activation, room = ctx.plan
        mean, rstd, weight, scale, shift, *slabs = ctx.saved_tensors
        spread = context.spread
        means, scales, shifts = spread(mean), spread(scale), spread(shift)
        if _direct(context, pooled, slabs):
            known, box = (mean, rstd, scale, shift), context.communicator.mailbox
            found = choice.direct_backward_coefficients(gradients[0], slabs[0], known, activation, weight, voxels, box)
        else:
            rows = zip(gradients, slabs, means, scales, shifts, strict=True)
            partials = [choice.gradient_sums(*row, activation) for row in rows]
            stacked = context.communicator.collect(partials)
            average = pooled.needed(mean.shape[0])
            found = choice.backward_coefficients(stacked, mean, rstd, weight, voxels, average)
        slope, offset = found[0], found[1]
        moment, total = found[2:, 0] if mean.shape[0] == 1 else found[2:].sum(1)  # one launch less
        rows = zip(gradients, slabs, scales, shifts, spread(slope), spread(offset), strict=True)
        # The convolution in front of the norm wants neighbours' planes around its gradient.
        inputs = [
            choice.gradient_input(*row, activation, out=roomy(row[1], room) if room and len(row[1]) == 1 else None)
            for row in rows
        ]
        weight_gradient = moment.to(weight) if weight is not None else None
        bias_gradient = total.to(rstd if weight is None else weight) if has_bias else None
        return None, weight_gradient, bias_gradient, *inputs
