"""Who computes a norm: Triton's kernels where they take the slab, else plain torch, which defines the results."""

from collections.abc import Callable

import torch
from torch import Tensor

from volseg.device.norm import exchanged, gathered, passes, reference, statistics
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.norm.grouping import ALONE, Grouping
from volseg.device.norm.running import Running
from volseg.device.peer.values import ValueMailbox
from volseg.device.triton_tiles import takes

__all__ = [
    "affine",
    "backward_coefficients",
    "coefficients",
    "compute_shares",
    "exchange_backward_coefficients",
    "exchange_coefficients",
    "given_coefficients",
    "gradient_input",
    "gradient_sums",
    "gradient_sums_of_parts",
    "moments",
    "takes",
]


def compute_shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each shard's share of the voxels, ``(shards, 1, 1)``."""
    voxels = torch.tensor(counts, dtype=torch.float64)
    return (voxels / voxels.sum()).to(dtype).reshape(-1, 1, 1).to(device)


def moments(slab: Tensor) -> Tensor:
    """Compute ``reference.moments``."""
    return statistics.moments(slab) if takes(slab) else reference.moments(slab)


def coefficients(
    stacked: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    average: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Compute ``reference.coefficients``.

    Parameters
    ----------
    stacked, shares, weight, bias, eps, average
        See ``reference.coefficients``.
    """
    if average is None and takes(stacked) and stacked.dtype == torch.float32:
        return gathered.coefficients(stacked, shares, weight, bias, eps)
    return reference.coefficients(stacked, shares, weight, bias, eps, average)


def backward_coefficients(
    stacked: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    average: Callable[[Tensor], Tensor] | None,
    given: bool = False,
) -> Tensor:
    """Compute ``reference.backward_coefficients``.

    Parameters
    ----------
    stacked, mean, rstd, weight, voxels, average, given
        See ``reference.backward_coefficients``.
    """
    if average is None and not given and takes(stacked) and stacked.dtype == torch.float32:
        return gathered.backward_coefficients(stacked, mean, rstd, weight, voxels)
    return reference.backward_coefficients(stacked, mean, rstd, weight, voxels, average, given)


def exchange_coefficients(
    slab: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    running: Running | None = None,
) -> Tensor:
    """Return ``coefficients`` of a slab and those of the others, exchanged by the kernel that uses them.

    Parameters
    ----------
    slab
        One that Triton ``takes``.
    shares, weight, bias, eps
        See ``reference.coefficients``; where the kernel runs.
    mailbox
        How the kernel exchanges; None where there is one slab.
    grouping
        Which pairs of sample and channel share their statistics.
    running
        What the kernel moves towards them, where there is one slab: elsewhere it may run more than once.
    """
    assert running is None or mailbox is None
    return exchanged.exchange_coefficients(slab, shares, weight, bias, eps, mailbox, grouping, running)


def given_coefficients(
    slab: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute ``reference.given_coefficients``.

    Parameters
    ----------
    slab, mean, variance, weight, bias, eps
        See ``reference.given_coefficients``.
    """
    ours = takes(slab) and takes(mean) and mean.dtype == torch.float32
    compute = gathered.given_coefficients if ours else reference.given_coefficients
    return compute(slab, mean, variance, weight, bias, eps)


def exchange_backward_coefficients(
    partials: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    mailbox: ValueMailbox | None,
    grouping: Grouping = ALONE,
    given: bool = False,
) -> Tensor:
    """Return ``backward_coefficients`` likewise.

    Parameters
    ----------
    partials
        Sums of each part of the slab: see ``gradient_sums_of_parts``.
    mean, rstd
        Of the slab; the second where the kernel runs.
    weight, voxels, given
        See ``reference.backward_coefficients``.
    mailbox, grouping
        See ``exchange_coefficients``.
    """
    partials, mean = (value.to(rstd.device, non_blocking=True) for value in (partials, mean))
    return exchanged.exchange_backward_coefficients(partials, mean, rstd, weight, voxels, mailbox, grouping, given)


def gradient_sums_of_parts(
    gradient: Tensor,
    slab: Tensor,
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    slope: Tensor | None = None,
) -> Tensor:
    """Return ``reference.gradient_sums`` of each part of a slab, ``(parts, 2 or 3, B, C)``.

    Parameters
    ----------
    gradient, slab, mean, scale, shift, activation, slope
        See ``reference.gradient_sums``.
    """
    if takes(slab):
        return passes.gradient_sums(gradient, slab, mean, scale, shift, activation, slope)
    return reference.gradient_sums(gradient, slab, mean, scale, shift, activation, slope).unsqueeze(0)


def affine(
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    ends: tuple[int, int] | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.affine``.

    Parameters
    ----------
    slab, scale, shift, activation, out, ends, slope
        See ``reference.affine``.
    """
    compute = passes.affine if takes(slab) else reference.affine
    return compute(slab, scale, shift, activation, out, ends, slope)


def gradient_sums(
    gradient: Tensor,
    slab: Tensor,
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    slope: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.gradient_sums``.

    Parameters
    ----------
    gradient, slab, mean, scale, shift, activation, slope
        See ``reference.gradient_sums``.
    """
    if takes(slab):
        return passes.gradient_sums(gradient, slab, mean, scale, shift, activation, slope).sum(0)
    return reference.gradient_sums(gradient, slab, mean, scale, shift, activation, slope)


def gradient_input(
    gradient: Tensor,
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    factor: Tensor,
    offset: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.gradient_input``.

    Parameters
    ----------
    gradient, slab, scale, shift, factor, offset, activation, out, slope
        See ``reference.gradient_input``.
    """
    compute = passes.gradient_input if takes(slab) else reference.gradient_input
    return compute(gradient, slab, scale, shift, factor, offset, activation, out, slope)
