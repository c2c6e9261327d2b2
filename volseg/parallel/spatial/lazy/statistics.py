"""What a norm's slabs and replicas come to together: its statistics, and the sums of its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.norm import choice
from volseg.device.norm.grouping import ALONE, Grouping
from volseg.device.norm.running import Running
from volseg.device.peer.values import CAPACITY, ValueMailbox
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.volume import ShardedVolume

if TYPE_CHECKING:
    from volseg.parallel.replicas import Replicas

__all__ = ["NormStatistics", "Pooled", "combine_sums", "compute_statistics", "take_statistics"]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Which (sample, channel) pairs share statistics."""

    grouping: Grouping = ALONE
    replicas: "Replicas | None" = None
    """Whose samples are one batch with the own ones, for statistics over it."""
    given: bool = False
    """Whether the statistics are given, and do not come from the input."""

    @property
    def over_replicas(self) -> bool:
        """Whether samples of other replicas count."""
        return self.grouping.over_batch and self.replicas is not None

    def needed(self, batch: int, channels: int) -> Callable[[Tensor], Tensor] | None:
        """Return ``average``, or None where every pair is its own group."""
        return None if self.grouping.is_alone(batch, channels) and not self.over_replicas else self.average

    def ignores_channels(self, batch: int, channels: int) -> bool:
        """Say whether a number that is added to a channel changes nothing, so that its gradient is zero."""
        return not self.given and (self.grouping.over_batch or self.grouping.is_alone(batch, channels))

    def average(self, pairs: Tensor) -> Tensor:
        """Replace each entry of ``(B, C)`` by the mean of its group."""
        if self.over_replicas:
            assert self.replicas is not None
            return self.replicas.average_rows(pairs).expand_as(pairs)
        return self.grouping.average(pairs)


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """What a norm computes from its input, ``(B, C)`` on the home device, and the number of voxels of a channel."""

    mean: Tensor
    variance: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor
    voxels: int


@lru_cache(maxsize=1024)
def count_slab_voxels(grid: tuple[int, ...], dims: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Return the number of voxels of every shard's slab, in the order of the grid."""
    counts = [prod(size for dim, size in enumerate(shape) if dim >= 2 and dim not in dims)]
    for dim, num_shards in zip(dims, grid, strict=True):
        counts = [count * (stop - start) for count in counts for start, stop in spans(shape[dim], num_shards)]
    return tuple(counts)


def compute_statistics(
    volume: ShardedVolume,
    slabs: Sequence[Tensor],
    pooled: Pooled,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
) -> NormStatistics:
    """Compute and combine the slabs' statistics.

    Parameters
    ----------
    volume, slabs
        The norm's input; the slabs perhaps without a number that is added to a channel.
    pooled
        Which pairs share their statistics.
    weight, bias
        Of the channels; None where the norm has none.
    eps
        Added to the variance.
    running
        Of a norm over the batch, which are moved.
    """
    context = volume.context
    counts = count_slab_voxels(context.communicator.grid, volume.dims, volume.shape)
    with torch.no_grad():  # the gradient through the statistics is part of the norm's own
        if _fits_one_kernel(context, pooled, slabs):
            shares = context.communicator.shares(counts, torch.float32, context.communicator.home)
            given = weight, bias, eps
            settings: dict[str, Any] = {"grouping": pooled.grouping}
            if running is not None and _moves(context, running):
                settings["running"], running = running, None
            calls = [partial(_exchange_coefficients, slab, shares, given, settings) for slab in slabs]
            found = _exchange(context, calls, slabs[0])
        else:
            # (num_shards, 2, B, C)
            stacked = context.communicator.collect([choice.moments(slab) for slab in slabs])
            shares = context.communicator.shares(counts, stacked.dtype, stacked.device)
            found = choice.coefficients(stacked, shares, weight, bias, eps, pooled.needed(*volume.shape[:2]))
        mean, variance, rstd, scale, shift = found.unbind(0)
        if running is not None:
            # Samples that share their statistics have the same ones: no average of them is needed.
            running.update(mean[0], variance[0], _count_of_batch(pooled, len(mean), sum(counts), variance))
    return NormStatistics(mean, variance, rstd, scale, shift, sum(counts))


def _moves(context: Context, running: Running) -> bool:
    """Say whether the kernel that computes the statistics moves the running ones: not where it may run twice."""
    return context.communicator.values is None and running.fits_kernel() and fusions.is_on("pooled statistics")


def _count_of_batch(pooled: Pooled, samples: int, voxels: int, like: Tensor) -> int | Tensor:
    """Return the voxels of a channel over all samples, of all replicas."""
    if not pooled.over_replicas:
        return samples * voxels
    assert pooled.replicas is not None
    return pooled.replicas.count_rows(samples, like) * voxels


def _exchange_coefficients(
    slab: Tensor, shares: Tensor, given: tuple[Any, ...], settings: dict[str, Any], mailbox: ValueMailbox | None
) -> Tensor:
    weight, bias, eps = given
    return choice.exchange_coefficients(slab, shares, weight, bias, eps, mailbox, **settings)


def take_statistics(
    volume: ShardedVolume,
    slabs: Sequence[Tensor],
    running: Running,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> NormStatistics:
    """Return the statistics of a norm in evaluation: the running ones.

    Parameters
    ----------
    volume, slabs
        See ``compute_statistics``.
    running
        Mean and variance of each channel.
    weight, bias, eps
        See ``compute_statistics``.
    """
    with torch.no_grad():
        home = volume.context.communicator.home
        own = running.mean.to(home), running.variance.to(home)
        found = choice.given_coefficients(slabs[0], *own, weight, bias, eps)
    counts = count_slab_voxels(volume.context.communicator.grid, volume.dims, volume.shape)
    mean, variance, rstd, scale, shift = found.unbind(0)
    return NormStatistics(mean, variance, rstd, scale, shift, sum(counts))


def _fits_one_kernel(context: Context, pooled: Pooled, slabs: Sequence[Tensor]) -> bool:
    """Say whether one kernel exchanges statistics and computes what follows from them."""
    batch, channels = slabs[0].shape[:2]
    values = context.communicator.values
    reached = context.communicator.num_shards == 1 or (values is not None and 2 * batch * channels <= CAPACITY)
    alone = pooled.grouping.is_alone(batch, channels) or fusions.is_on("pooled statistics")
    return reached and alone and not pooled.over_replicas and choice.takes(slabs[0])


def _exchange(context: Context, calls: Sequence[Callable[[Any], Tensor]], like: Tensor) -> Tensor:
    """Run the kernel of each slab of this process that exchanges statistics, of which ``like`` has the channels."""
    values = context.communicator.values
    if values is None:
        (call,) = calls
        return call(None)
    return values.run(calls, 2 * like.shape[0] * like.shape[1])


def combine_sums(
    context: Context,
    pooled: Pooled,
    sums: Sequence[Tensor],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    slabs: Sequence[Tensor],
) -> Tensor:
    """Return ``reference.backward_coefficients`` of all slabs.

    Parameters
    ----------
    context, pooled
        Of the norm.
    sums
        Of the parts of each slab of this process, ``(parts, 2 or 3, B, C)``.
    mean, rstd, weight, voxels
        See ``reference.backward_coefficients``.
    slabs
        The norm's input.
    """
    if _fits_one_kernel(context, pooled, slabs):
        calls = [partial(_exchange_backward, (own, mean, rstd, weight, voxels), pooled) for own in sums]
        return _exchange(context, calls, slabs[0])
    stacked = context.communicator.collect([own[:, :2].sum(0) for own in sums])
    average = pooled.needed(*mean.shape)
    return choice.backward_coefficients(stacked, mean, rstd, weight, voxels, average, pooled.given)


def _exchange_backward(given: tuple[Any, ...], pooled: Pooled, mailbox: ValueMailbox | None) -> Tensor:
    partials, mean, rstd, weight, voxels = given
    settings = mailbox, pooled.grouping, pooled.given
    return choice.exchange_backward_coefficients(partials, mean, rstd, weight, voxels, *settings)
