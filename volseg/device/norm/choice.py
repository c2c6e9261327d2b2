"""Arithmetic of the sharded norms on one slab: Triton on CUDA, plain torch elsewhere.

A norm and the activation behind it are one pass: ``act(slab * scale + shift)``. Half precision is widened to float32
inside and rounded once at the end. ``(B, C)`` values broadcast over the voxels. The plain versions define what the
others compute.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device import triton_tiles
from volseg.device.norm import passes, statistics
from volseg.device.peer.values import Mailbox

__all__ = [
    "IDENTITY",
    "Activation",
    "affine",
    "backward_coefficients",
    "coefficients",
    "direct_backward_coefficients",
    "direct_coefficients",
    "fused",
    "gradient_input",
    "gradient_sums",
    "moments",
    "shares",
]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function applied behind the norm: ``parameter`` is leaky ReLU's slope or ELU's alpha."""

    kind: Literal["none", "leaky", "elu"] = "none"
    parameter: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """Return the activated tensor."""
        if self.kind == "leaky":
            return F.leaky_relu(x, self.parameter)
        return F.elu(x, self.parameter) if self.kind == "elu" else x

    def derivative(self, x: Tensor) -> Tensor:
        """Return the derivative at ``x``, the value before activation."""
        if self.kind == "leaky":
            # Not torch.where of two numbers: its result is float32 whatever x is.
            return torch.ones_like(x).masked_fill_(x <= 0, self.parameter)
        return torch.where(x > 0, 1.0, self.parameter * x.exp()) if self.kind == "elu" else torch.ones_like(x)


IDENTITY = Activation()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _over_voxels(pairs: Tensor, like: Tensor) -> Tensor:
    return pairs.reshape(*pairs.shape, *([1] * (like.ndim - 2)))


def fused(slab: Tensor) -> bool:
    """Say whether the Triton kernels take this slab."""
    return slab.is_cuda and slab.dtype != torch.float64 and triton_tiles.available()


@cache  # without a limit: recorded steps read these tensors from where they lie
def shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each shard's share of the voxels, ``(shards, 1, 1)``; cached, so that no step waits for its copy."""
    voxels = torch.tensor(counts, dtype=torch.float64)
    return (voxels / voxels.sum()).to(dtype).reshape(-1, 1, 1).to(device)


def coefficients(
    stacked: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    average: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Combine the shards' moments ``(shards, 2, B, C)`` by Chan's formula (see ``reductions.moments``).

    ``average`` replaces each pair's value by its group's mean; None where each pair is its own group.

    Returns mean, biased variance, reciprocal deviation, scale and shift, ``(5, B, C)``.
    """
    if average is None and fused(stacked) and stacked.dtype == torch.float32:
        return statistics.coefficients(stacked, shares, weight, bias, eps)
    means, variances = stacked.unbind(1)
    mean = (means * shares).sum(0)
    variance = ((variances + (means - mean).square()) * shares).sum(0)
    if average is not None:
        center = average(mean)
        mean, variance = center, average(variance + (mean - center).square())
    rstd = (variance + eps).rsqrt()
    scale = rstd if weight is None else rstd * weight.to(rstd)
    shift = -mean * scale if bias is None else torch.addcmul(bias.to(rstd), mean, scale, value=-1)
    return torch.stack([mean, variance, rstd, scale, shift])


def backward_coefficients(
    stacked: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    average: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Combine the shards' gradient sums ``(shards, 2, B, C)``; see ``gradient_input`` for what they are used for.

    Returns slope, offset, and the gradients of weight and bias for each sample, ``(4, B, C)``.
    """
    if average is None and fused(stacked) and stacked.dtype == torch.float32:
        return statistics.backward_coefficients(stacked, mean, rstd, weight, voxels)
    total, moment = stacked.sum(0)
    moment = moment * rstd
    first, second = (total, moment) if weight is None else (total * weight.to(rstd), moment * weight.to(rstd))
    if average is not None:
        first, second = average(first), average(second)
    slope = -rstd * rstd * second / voxels
    offset = -rstd * first / voxels - slope * mean
    return torch.stack([slope, offset, moment, total])


def direct_coefficients(
    slab: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mailbox: Mailbox | None,
) -> Tensor:
    """Return ``coefficients`` of this process's slab and those of the others, exchanged by the kernel that uses them.

    For slabs that are ``fused`` and pairs that are their own group; without a mailbox there is one slab.
    """
    return statistics.direct_coefficients(slab, shares, weight, bias, eps, mailbox)


def direct_backward_coefficients(
    gradient: Tensor,
    slab: Tensor,
    found: tuple[Tensor, Tensor, Tensor, Tensor],
    activation: Activation,
    weight: Tensor | None,
    voxels: int,
    mailbox: Mailbox | None,
) -> Tensor:
    """Return ``backward_coefficients`` likewise; ``found`` are mean, reciprocal deviation, scale and shift."""
    mean, rstd, scale, shift = found
    partials = passes.gradient_sums(gradient, slab, mean, scale, shift, activation)
    return statistics.direct_backward_coefficients(partials, mean, rstd, weight, voxels, mailbox)


def moments(slab: Tensor) -> Tensor:
    """Return mean and biased variance over the voxels, ``(2, B, C)``."""
    if fused(slab):
        return statistics.moments(slab)
    variance, mean = torch.var_mean(_wide(slab).flatten(2), 2, correction=0)
    return torch.stack([mean, variance])


def affine(
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    ends: tuple[int, int] | None = None,
) -> Tensor:
    """Return ``act(slab * scale + shift)``, in ``out`` where it is given.

    With ``ends``, only so many of the first and of the last planes of ``out`` are written.
    """
    if fused(slab):
        return passes.affine(slab, scale, shift, activation, out, ends)
    if ends is not None and out is not None:
        front, back = ends
        for start, count in ((0, front), (slab.shape[2] - back, back)):
            affine(slab.narrow(2, start, count), scale, shift, activation, out.narrow(2, start, count))
        return out
    result = torch.addcmul(_over_voxels(shift, slab), _wide(slab), _over_voxels(scale, slab))
    result = activation.apply(result).to(slab.dtype)
    return result if out is None else out.copy_(result)


def _before_activation(gradient: Tensor, slab: Tensor, scale: Tensor, shift: Tensor, activation: Activation) -> Tensor:
    wide = _wide(gradient)
    if activation.kind == "none":
        return wide
    value = torch.addcmul(_over_voxels(shift, slab), _wide(slab), _over_voxels(scale, slab))
    return wide * activation.derivative(value)


def gradient_sums(
    gradient: Tensor, slab: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation = IDENTITY
) -> Tensor:
    """Return the sums over the voxels of ``g`` and of ``g * (slab - mean)``, ``(2, B, C)``.

    ``g`` is the gradient before the activation.
    """
    if fused(slab):
        return passes.gradient_sums(gradient, slab, mean, scale, shift, activation).sum(0)
    before = _before_activation(gradient, slab, scale, shift, activation).flatten(2)
    centered = _wide(slab).flatten(2) - mean.unsqueeze(-1)
    return torch.stack([before.sum(2), (before * centered).sum(2)])


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
    """Return ``scale * g + slope * slab + offset``, in ``out`` where it is given; ``g`` is before the activation."""
    if fused(slab):
        return passes.gradient_input(gradient, slab, scale, shift, slope, offset, activation, out)
    before = _before_activation(gradient, slab, scale, shift, activation)
    result = torch.addcmul(_over_voxels(offset, slab), _wide(slab), _over_voxels(slope, slab))
    result = result.addcmul_(before, _over_voxels(scale, slab)).to(slab.dtype)
    return result if out is None else out.copy_(result)
