"""Who computes a norm: Triton's kernels where they take the slab, else plain torch, which defines the results."""

from collections.abc import Callable

import torch
from torch import Tensor

from volseg.device.norm import passes, reference, statistics
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.peer.values import ValueMailbox
from volseg.device.triton_tiles import takes

__all__ = [
    "affine",
    "backward_coefficients",
    "coefficients",
    "compute_shares",
    "exchange_backward_coefficients",
    "exchange_coefficients",
    "gradient_input",
    "gradient_sums",
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
        return statistics.coefficients(stacked, shares, weight, bias, eps)
    return reference.coefficients(stacked, shares, weight, bias, eps, average)


def backward_coefficients(
    stacked: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    average: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Compute ``reference.backward_coefficients``.

    Parameters
    ----------
    stacked, mean, rstd, weight, voxels, average
        See ``reference.backward_coefficients``.
    """
    if average is None and takes(stacked) and stacked.dtype == torch.float32:
        return statistics.backward_coefficients(stacked, mean, rstd, weight, voxels)
    return reference.backward_coefficients(stacked, mean, rstd, weight, voxels, average)


def exchange_coefficients(
    slab: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mailbox: ValueMailbox | None,
) -> Tensor:
    """Return ``coefficients`` of a slab and those of the others, exchanged by the kernel that uses them.

    Parameters
    ----------
    slab
        One that Triton ``takes``; each pair of sample and channel is a group of its own.
    shares, weight, bias, eps
        See ``reference.coefficients``; where the kernel runs.
    mailbox
        How the kernel exchanges; None where there is one slab.
    """
    return statistics.exchange_coefficients(slab, shares, weight, bias, eps, mailbox)


def exchange_backward_coefficients(
    gradient: Tensor,
    slab: Tensor,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    activation: Activation,
    weight: Tensor | None,
    voxels: int,
    mailbox: ValueMailbox | None,
) -> Tensor:
    """Return ``backward_coefficients`` likewise.

    Parameters
    ----------
    gradient, slab, activation
        See ``reference.gradient_sums``.
    found
        Mean, reciprocal deviation, scale and shift; the second where the kernel runs, the others where the slab is.
    weight, voxels
        See ``reference.backward_coefficients``.
    mailbox
        See ``exchange_coefficients``.
    """
    mean, rstd, scale, shift = found
    partials = passes.gradient_sums(gradient, slab, mean, scale, shift, activation)
    partials, mean = (value.to(rstd.device, non_blocking=True) for value in (partials, mean))
    return statistics.exchange_backward_coefficients(partials, mean, rstd, weight, voxels, mailbox)


def affine(
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    ends: tuple[int, int] | None = None,
) -> Tensor:
    """Compute ``reference.affine``.

    Parameters
    ----------
    slab, scale, shift, activation, out, ends
        See ``reference.affine``.
    """
    compute = passes.affine if takes(slab) else reference.affine
    return compute(slab, scale, shift, activation, out, ends)


def gradient_sums(
    gradient: Tensor, slab: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation = IDENTITY
) -> Tensor:
    """Compute ``reference.gradient_sums``.

    Parameters
    ----------
    gradient, slab, mean, scale, shift, activation
        See ``reference.gradient_sums``.
    """
    if takes(slab):
        return passes.gradient_sums(gradient, slab, mean, scale, shift, activation).sum(0)
    return reference.gradient_sums(gradient, slab, mean, scale, shift, activation)


def gradient_input(
    gradient: Tensor,
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    slope: Tensor,
    offset: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``reference.gradient_input``.

    Parameters
    ----------
    gradient, slab, scale, shift, slope, offset, activation, out
        See ``reference.gradient_input``.
    """
    compute = passes.gradient_input if takes(slab) else reference.gradient_input
    return compute(gradient, slab, scale, shift, slope, offset, activation, out)
