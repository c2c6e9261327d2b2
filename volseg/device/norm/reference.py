"""Arithmetic of the norms on one slab in plain torch: it defines what the kernels compute.

A norm and the activation behind it are one pass: ``act(slab * scale + shift)``. Half precision is widened to float32
inside and rounded once at the end. ``(B, C)`` values broadcast over the voxels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from volseg.device.norm.activation import IDENTITY, Activation

__all__ = [
    "affine",
    "backward_coefficients",
    "coefficients",
    "gradient_input",
    "gradient_sums",
    "moments",
]


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _spread_over_voxels(pairs: Tensor, like: Tensor) -> Tensor:
    return pairs.reshape(*pairs.shape, *([1] * (like.ndim - 2)))


def moments(slab: Tensor) -> Tensor:
    """Return mean and biased variance over the voxels, ``(2, B, C)``."""
    variance, mean = torch.var_mean(_widen(slab).flatten(2), 2, correction=0)
    return torch.stack([mean, variance])


def coefficients(
    stacked: Tensor,
    shares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    average: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Combine the shards' moments by Chan's formula; return mean, variance, rstd, scale and shift, ``(5, B, C)``.

    Parameters
    ----------
    stacked
        Each shard's ``moments``, ``(shards, 2, B, C)``.
    shares
        Each shard's share of the voxels, ``(shards, 1, 1)``.
    weight, bias
        Of the norm, ``(C,)``, or None.
    eps
        Added to the variance, which is biased; ``rstd`` is the reciprocal of the root of both.
    average
        Replaces each pair's value by its group's mean; None where each pair is its own group.
    """
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
    """Combine the shards' gradient sums; return slope, offset, gradients of weight and bias per sample, ``(4, B, C)``.

    Parameters
    ----------
    stacked
        Each shard's ``gradient_sums``, ``(shards, 2, B, C)``.
    mean, rstd, weight, average
        See ``coefficients``.
    voxels
        Of all shards.
    """
    total, moment = stacked.sum(0)
    moment = moment * rstd
    first, second = (total, moment) if weight is None else (total * weight.to(rstd), moment * weight.to(rstd))
    if average is not None:
        first, second = average(first), average(second)
    slope = -rstd * rstd * second / voxels
    offset = -rstd * first / voxels - slope * mean
    return torch.stack([slope, offset, moment, total])


def affine(
    slab: Tensor,
    scale: Tensor,
    shift: Tensor,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    ends: tuple[int, int] | None = None,
) -> Tensor:
    """Return ``act(slab * scale + shift)``.

    Parameters
    ----------
    slab
        ``(B, C, D, H, W)``.
    scale, shift
        ``(B, C)``.
    activation
        Applied behind both.
    out
        Where the result goes.
    ends
        How many of the first and of the last planes of ``out`` are written, instead of all.
    """
    if ends is not None and out is not None:
        front, back = ends
        for start, count in ((0, front), (slab.shape[2] - back, back)):
            affine(slab.narrow(2, start, count), scale, shift, activation, out.narrow(2, start, count))
        return out
    result = torch.addcmul(_spread_over_voxels(shift, slab), _widen(slab), _spread_over_voxels(scale, slab))
    result = activation.apply(result).to(slab.dtype)
    return result if out is None else out.copy_(result)


def _differentiate_activation(
    gradient: Tensor, slab: Tensor, scale: Tensor, shift: Tensor, activation: Activation
) -> Tensor:
    """Return what is left of the output's gradient before the activation.

    Parameters
    ----------
    gradient, slab, scale, shift, activation
        See ``gradient_sums``.
    """
    wide = _widen(gradient)
    if activation.kind == "none":
        return wide
    value = torch.addcmul(_spread_over_voxels(shift, slab), _widen(slab), _spread_over_voxels(scale, slab))
    return wide * activation.derivative(value)


def gradient_sums(
    gradient: Tensor, slab: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation = IDENTITY
) -> Tensor:
    """Return the sums over the voxels of ``g`` and of ``g * (slab - mean)``, ``(2, B, C)``.

    Parameters
    ----------
    gradient
        Of the output; ``g`` is what is left of it before the activation.
    slab, scale, shift, activation
        What ``affine`` was given.
    mean
        Of the slab, ``(B, C)``.
    """
    before = _differentiate_activation(gradient, slab, scale, shift, activation).flatten(2)
    centered = _widen(slab).flatten(2) - mean.unsqueeze(-1)
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
    """Return the input's gradient, ``scale * g + slope * slab + offset``.

    Parameters
    ----------
    gradient, slab, scale, shift, activation
        See ``gradient_sums``.
    slope, offset
        ``(B, C)``, of ``backward_coefficients``.
    out
        Where the result goes.
    """
    before = _differentiate_activation(gradient, slab, scale, shift, activation)
    result = torch.addcmul(_spread_over_voxels(offset, slab), _widen(slab), _spread_over_voxels(slope, slab))
    result = result.addcmul_(before, _spread_over_voxels(scale, slab)).to(slab.dtype)
    return result if out is None else out.copy_(result)
