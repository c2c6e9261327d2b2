"""Combine a norm's statistics, and the sums of its backward pass, over slabs and replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from volseg.device import fusions
from volseg.device.norm import choice, exchanged, reference
from volseg.device.norm.activation import Activation
from volseg.device.norm.exchanged import ExchangedGradients, count_values
from volseg.device.norm.grouping import ALONE, Grouping
from volseg.device.norm.reference import Running
from volseg.device.peer.values import CAPACITY, ValueExchange
from volseg.device.triton_tiles import takes
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.lazy.bias import note_vanishing
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.volume import ShardedVolume

if TYPE_CHECKING:
    from volseg.parallel.replicas import Replicas

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pooled:
    """Which (sample, channel) pairs share statistics."""

    grouping: Grouping = ALONE
    replicas: "Replicas | None" = None
    """Replicas whose samples form one batch with those of this process."""
    given: bool = False
    """Whether the statistics are given, and do not come from the input."""

    @property
    def over_replicas(self) -> bool:
        """Whether the statistics include samples of other replicas."""
        return self.grouping.over_batch and self.replicas is not None

    def needed(self, batch: int, channels: int) -> Callable[[Tensor], Tensor] | None:
        """Return a function that averages over each group of pairs; None if every pair is its own group."""
        return None if self.grouping.is_alone(batch, channels) else self.grouping.average

    def ignores_channels(self, batch: int, channels: int) -> bool:
        """Return whether a constant that is added to a channel changes nothing, so that its gradient is zero."""
        return not self.given and (self.grouping.over_batch or self.grouping.is_alone(batch, channels))


class Affine(NamedTuple):
    """Weight and bias of the channels, None if a norm has none, and the constant added to the variance."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Statistics of a norm's input, ``(B, C)`` on the home device, and the number of voxels of a channel.

    ``voxels`` counts the voxels of one sample; with replicas it is a tensor, and counts those of all samples.
    """

    mean: Tensor
    variance: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor
    voxels: int | Tensor


@lru_cache(maxsize=1024)
def count_slab_voxels(grid: tuple[int, ...], dims: tuple[int, ...], shape: torch.Size) -> tuple[int, ...]:
    """Return the number of voxels of every shard's slab, in the order of the grid."""
    counts = [prod(size for dim, size in enumerate(shape) if dim >= 2 and dim not in dims)]
    for dim, num_shards in zip(dims, grid, strict=True):
        counts = [count * (stop - start) for count in counts for start, stop in spans(shape[dim], num_shards)]
    return tuple(counts)


def compute_statistics(
    volume: ShardedVolume, slabs: Sequence[Tensor], pooled: Pooled, affine: Affine, running: Running | None = None
) -> NormStatistics:
    """Compute and combine the slabs' statistics.

    Parameters
    ----------
    volume, slabs
        The norm's input; the slabs may lack a constant per channel.
    pooled
        Which pairs share their statistics.
    affine
        Weight, bias and eps of the norm.
    running
        Running statistics of a norm over the batch, to be updated.
    """
    context = volume.context
    counts = count_slab_voxels(context.communicator.grid, volume.dims, volume.shape)
    voxels = sum(counts)
    with torch.no_grad():  # the gradient through the statistics is part of the norm's own
        exchange = _find_exchange(context, pooled, slabs)
        if exchange is not None:
            settings: dict[str, Any] = {"grouping": pooled.grouping, "replicas": exchange.replicas, "voxels": voxels}
            if running is not None and running.fits_kernel() and fusions.is_on("pooled statistics"):
                settings["running"], running = running, None
            home = context.communicator.home
            shares = None if pooled.over_replicas else context.communicator.shares(counts, torch.float32, home)
            calls = [partial(exchanged.exchange_coefficients, own, shares, *affine, **settings) for own in slabs]
            found, number = exchange.run(calls)
        else:
            # (num_shards, 2, B, C)
            stacked = context.communicator.collect([choice.moments(slab) for slab in slabs])
            shares = context.communicator.shares(counts, stacked.dtype, stacked.device)
            if pooled.over_replicas:
                found, number = _join_replicas(pooled, stacked, shares, voxels, affine)
            else:
                average, number = pooled.needed(*volume.shape[:2]), None
                found = reference.coefficients(stacked, shares, *affine, average)
        mean, variance, rstd, scale, shift = found.unbind(0)
        if running is not None:
            # Samples that share their statistics have equal ones: they need no average.
            running.update(mean[0], variance[0], len(mean) * voxels if number is None else number)
    return NormStatistics(mean, variance, rstd, scale, shift, voxels if number is None else number)


def _join_replicas(
    pooled: Pooled, stacked: Tensor, shares: Tensor, voxels: int, affine: Affine
) -> tuple[Tensor, Tensor]:
    """Return ``reference.coefficients`` over the samples of all replicas, and the number of their voxels.

    Parameters
    ----------
    pooled
        Has the replicas.
    stacked, shares
        See ``reference.coefficients``.
    voxels
        Voxels of a channel in a sample, over all shards.
    affine
        Weight, bias and eps of the norm.
    """
    assert pooled.replicas is not None
    means, variances = reference.join_moments(stacked, shares)
    center = means.mean(0)
    spread = (variances + (means - center).square()).mean(0)
    mean, variance, number = pooled.replicas.join_moments(center, spread, len(means) * voxels)
    own = mean.expand_as(means), variance.expand_as(means)
    return reference.compute_scale_and_shift(*own, affine.weight, affine.bias, affine.eps), number


def take_statistics(volume: ShardedVolume, slabs: Sequence[Tensor], running: Running, affine: Affine) -> NormStatistics:
    """Return the statistics of a norm in evaluation mode: its running statistics.

    Parameters
    ----------
    volume, slabs
        See ``compute_statistics``.
    running
        Mean and variance of each channel.
    affine
        Weight, bias and eps of the norm.
    """
    with torch.no_grad():
        home = volume.context.communicator.home
        own = running.mean.to(home), running.variance.to(home)
        found = choice.given_coefficients(slabs[0], *own, affine.weight, affine.bias, affine.eps)
    counts = count_slab_voxels(volume.context.communicator.grid, volume.dims, volume.shape)
    mean, variance, rstd, scale, shift = found.unbind(0)
    return NormStatistics(mean, variance, rstd, scale, shift, sum(counts))


@dataclass(frozen=True, slots=True)
class _OneKernel:
    """A single kernel that exchanges statistics and computes the coefficients from them."""

    values: ValueExchange | None
    """None if there is one slab."""
    count: int
    """Number of values that a slab sends."""
    replicas: int

    def run(self, calls: Sequence[Callable[[Any], Result]]) -> Result:
        """Run the kernel of each slab of this process."""
        if self.values is None:
            (call,) = calls
            return call(None)
        return self.values.run(calls, self.count)


def _find_exchange(context: Context, pooled: Pooled, slabs: Sequence[Tensor]) -> _OneKernel | None:
    """Return the exchange by a single kernel, or None; all processes decide the same, whatever rows they hold."""
    batch, channels = slabs[0].shape[:2]
    if not takes(slabs[0]):
        return None
    count = count_values(pooled.grouping, batch, channels, pooled.over_replicas)
    if pooled.over_replicas:
        assert pooled.replicas is not None
        values = None if context.over_replicas is None else context.over_replicas.values
        fits = values is not None and count <= CAPACITY and fusions.is_on("pooled statistics")
        return _OneKernel(values, count, pooled.replicas.count) if fits else None
    values = context.communicator.values
    reached = context.communicator.num_shards == 1 or (values is not None and count <= CAPACITY)
    alone = pooled.grouping.is_alone(batch, channels) or fusions.is_on("pooled statistics")
    return _OneKernel(values, count, 1) if reached and alone else None


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Settings of a norm's backward pass, besides tensors."""

    context: Context
    pooled: Pooled
    voxels: int | Tensor
    activation: Activation
    has_slope: bool
    has_bias: bool

    @classmethod
    def of(cls, norm: Any) -> "NormPlan":
        """Return the plan of a norm."""
        has = bool(norm.slopes), norm.bias is not None
        return cls(norm.context, norm.pooled, norm.found.voxels, norm.activation, *has)

    def combine(
        self, sums: Sequence[Tensor], mean: Tensor, rstd: Tensor, weight: Tensor | None, slabs: Sequence[Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None, Tensor | None]:
        """Return factor and offset for each slab, and the gradients of weight and bias.

        Parameters
        ----------
        sums
            Sums of the parts of each slab of this process, ``(parts, 2 or 3, B, C)``.
        mean, rstd, weight
            See ``reference.backward_coefficients``.
        slabs
            The norm's input.
        """
        found = self._exchange(sums, mean, rstd, weight, slabs)
        of_weight = None if weight is None else found.weight.to(weight)
        of_bias = found.bias.to(rstd if weight is None else weight) if self.has_bias else None
        return list(zip(*map(self.context.spread, found[:2]), strict=True)), of_weight, of_bias

    def _exchange(
        self, sums: Sequence[Tensor], mean: Tensor, rstd: Tensor, weight: Tensor | None, slabs: Sequence[Tensor]
    ) -> ExchangedGradients:
        """Return factor and offset of all slabs, and the gradients of weight and bias."""
        pooled = self.pooled
        if exchange := _find_exchange(self.context, pooled, slabs):
            settings: dict[str, Any] = {"grouping": pooled.grouping, "given": pooled.given}
            settings["replicas"] = exchange.replicas
            known = mean, rstd, weight, self.voxels
            calls = [partial(exchanged.exchange_backward_coefficients, own, *known, **settings) for own in sums]
            return exchange.run(calls)
        stacked = self.context.communicator.collect([own[:, :2].sum(0) for own in sums])
        if isinstance(self.voxels, Tensor):
            return _combine_over_replicas(pooled, stacked, mean, rstd, weight, self.voxels)
        average = pooled.needed(*mean.shape)
        found = reference.backward_coefficients(stacked, mean, rstd, weight, self.voxels, average, pooled.given)
        of_weight, of_bias = found[2:, 0] if mean.shape[0] == 1 else found[2:].sum(1)  # one launch less
        return ExchangedGradients(found[0], found[1], of_weight, of_bias)

    def note_vanishing(
        self, mean: Tensor, gradients: Sequence[Tensor], factors: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Mark the gradients of the norm's input as vanishing if they sum to zero."""
        if self.pooled.ignores_channels(*mean.shape):
            for gradient, (_, offset) in zip(gradients, factors, strict=True):
                note_vanishing(gradient, offset)


def _combine_over_replicas(
    pooled: Pooled, stacked: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, number: Tensor
) -> ExchangedGradients:
    """Return factor, offset and parameters' gradients, from sums over the samples of all replicas."""
    assert pooled.replicas is not None
    of_bias, moment = stacked.sum(0).sum(1)
    of_weight = moment * rstd[0]
    total, moment = pooled.replicas.add_up(torch.stack([of_bias, of_weight])) / number
    scale = rstd if weight is None else rstd * weight.to(rstd)
    factor = -rstd * scale * moment
    return ExchangedGradients(factor, -scale * total - factor * mean, of_weight, of_bias)
