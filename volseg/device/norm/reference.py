"""Arithmetic of the norms on one slab in plain torch: it defines the results of the kernels.

A norm and the following activation are one pass: ``act(slab * scale + shift)``. Half precision is widened to float32
inside and rounded once at the end. ``(B, C)`` values broadcast over the voxels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.device.norm.activation import Term


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
        Parameters of the norm, ``(C,)``, or None.
    eps
        Added to the variance, which is biased; ``rstd`` is the reciprocal of the root of both.
    average
        Replaces each pair's value by its group's mean; None if each pair is its own group.
    """
    mean, variance = join_moments(stacked, shares)
    if average is not None:
        center = average(mean)
        mean, variance = center, average(variance + (mean - center).square())
    return compute_scale_and_shift(mean, variance, weight, bias, eps)


def join_moments(stacked: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each pair over all shards, ``(B, C)``; see ``coefficients``."""
    means, variances = stacked.unbind(1)
    mean = (means * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0)


def compute_scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the result of ``coefficients`` from mean and variance of each pair."""
    rstd = (variance + eps).rsqrt()
    scale = rstd if weight is None else rstd * weight.to(rstd)
    shift = -mean * scale if bias is None else torch.addcmul(bias.to(rstd), mean, scale, value=-1)
    return torch.stack([mean, variance, rstd, scale, shift])


def given_coefficients(
    slab: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the result of ``coefficients`` for statistics that do not come from the slab.

    Parameters
    ----------
    slab
        ``(B, C, D, H, W)``.
    mean, variance
        Statistics of each channel, ``(C,)``: the running ones of a norm in evaluation.
    weight, bias, eps
        See ``coefficients``.
    """
    pairs = slab.shape[:2]
    wide = torch.promote_types(mean.dtype, torch.float32)
    return compute_scale_and_shift(mean.to(wide).expand(pairs), variance.to(wide).expand(pairs), weight, bias, eps)


def backward_coefficients(
    stacked: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    voxels: int,
    average: Callable[[Tensor], Tensor] | None,
    given: bool = False,
) -> Tensor:
    """Combine the shards' gradient sums; return factor, offset, gradients of weight and bias per sample, ``(4, B, C)``.

    Parameters
    ----------
    stacked
        Each shard's ``gradient_sums``, ``(shards, 2, B, C)``.
    mean, rstd, weight, average
        See ``coefficients``.
    voxels
        Number of voxels of all shards.
    given
        Whether the statistics do not come from the input: then factor and offset are zero.
    """
    total, moment = stacked.sum(0)
    moment = moment * rstd
    first, second = (total, moment) if weight is None else (total * weight.to(rstd), moment * weight.to(rstd))
    if average is not None:
        first, second = average(first), average(second)
    factor = -rstd * rstd * second / voxels
    offset = -rstd * first / voxels - factor * mean
    if given:
        factor = offset = torch.zeros_like(rstd)
    return torch.stack([factor, offset, moment, total])


def affine(term: Term, out: Tensor | None = None, ends: tuple[int, int] | None = None) -> Tensor:
    """Return ``act(slab * scale + shift)`` of a norm.

    Parameters
    ----------
    term
        The slab ``(B, C, D, H, W)``; scale and shift, ``(B, C)``; the activation after both, and its slope if it is
        PReLU, of one value or one per channel.
    out
        Memory of the result.
    ends
        Numbers of first and of last planes of ``out`` that are written, instead of all.
    """
    slab = term.slab
    if ends is not None and out is not None:
        front, back = ends
        for start, count in ((0, front), (slab.shape[2] - back, back)):
            affine(term._replace(slab=slab.narrow(2, start, count)), out.narrow(2, start, count))
        return out
    result = term.activation.apply(_scale(term), term.slope).to(slab.dtype)
    return result if out is None else out.copy_(result)


def _scale(term: Term) -> Tensor:
    """Return the value before the activation, half precision as float32."""
    scale, shift = (_spread_over_voxels(pairs, term.slab) for pairs in term.affine)
    return torch.addcmul(shift, _widen(term.slab), scale)


def _differentiate_activation(gradient: Tensor, term: Term) -> Tensor:
    """Return the gradient before the activation, from that of the output."""
    wide = _widen(gradient)
    return wide if term.activation.kind == "none" else wide * term.activation.derivative(_scale(term), term.slope)


def gradient_sums(gradient: Tensor, term: Term) -> Tensor:
    """Return the sums over the voxels of ``g`` and of ``g * (slab - mean)``, ``(2, B, C)``.

    With PReLU there is a third sum, ``(3, B, C)``: of the output's gradient times the value before the activation
    where this is negative, which is the slope's gradient.

    Parameters
    ----------
    gradient
        Gradient of the output; ``g`` is the gradient before the activation.
    term
        Argument of ``affine``, with the mean of the slab, ``(B, C)``.
    """
    assert term.mean is not None
    before = _differentiate_activation(gradient, term).flatten(2)
    centered = _widen(term.slab).flatten(2) - term.mean.unsqueeze(-1)
    sums = [before.sum(2), (before * centered).sum(2)]
    if term.activation.kind == "prelu":
        sums.append((_widen(gradient) * _scale(term).clamp(max=0)).flatten(2).sum(2))
    return torch.stack(sums)


def gradient_input(gradient: Tensor, term: Term, factor: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the input's gradient, ``scale * g + factor * slab + offset``.

    Parameters
    ----------
    gradient, term
        See ``gradient_sums``; no mean is needed.
    factor, offset
        ``(B, C)``, from ``backward_coefficients``.
    out
        Memory of the result.
    """
    slab, (scale, _) = term.slab, term.affine
    before = _differentiate_activation(gradient, term)
    result = torch.addcmul(_spread_over_voxels(offset, slab), _widen(slab), _spread_over_voxels(factor, slab))
    result = result.addcmul_(before, _spread_over_voxels(scale, slab)).to(slab.dtype)
    return result if out is None else out.copy_(result)


def check_sizes(channels: int, **given: Tensor | None) -> None:
    """Refuse parameters and buffers of a norm whose size is not the number of channels, as torch does.

    Raises
    ------
    RuntimeError
        If a size differs; names the tensor.
    """
    for name, value in given.items():
        if value is not None and value.shape != (channels,):
            raise RuntimeError(f"{name} should have {channels} values, one per channel, got {tuple(value.shape)}")


@dataclass(frozen=True, slots=True)
class Running:
    """A batch norm's buffers, ``(C,)``, and the momentum of their update."""

    mean: Tensor
    variance: Tensor
    momentum: float

    @classmethod
    def find(cls, mean: Tensor | None, variance: Tensor | None, momentum: float) -> "Running | None":
        """Return the buffers of a norm in training; None if it has none.

        Raises
        ------
        ValueError
            If the norm has only one of the two.
        """
        if (mean is None) != (variance is None):
            raise ValueError("running_mean and running_var must either both be None or neither be None")
        return None if mean is None or variance is None else cls(mean, variance, momentum)

    def fits_kernel(self) -> bool:
        """Return whether a kernel that counts in float32 updates the buffers as torch does."""
        return all(buffer.dtype == torch.float32 and buffer.is_contiguous() for buffer in (self.mean, self.variance))

    def update(self, mean: Tensor, variance: Tensor, count: int | Tensor) -> None:
        """Update the buffers.

        Parameters
        ----------
        mean, variance
            Statistics of the batch, ``(C,)``; the variance is biased.
        count
            Voxels of a channel, over all samples; a tensor if replicas share the batch. The running variance is
            unbiased: multiplied by ``count / (count - 1)``.
        """
        self.mean.lerp_(mean.to(self.mean), self.momentum)
        variance = variance.to(self.variance)
        self.variance.lerp_(variance, self.momentum)
        if isinstance(count, Tensor):
            self.variance.addcdiv_(variance, count - 1, value=self.momentum)
        else:
            self.variance.add_(variance, alpha=self.momentum / (count - 1))

    def shift(self, bias: Tensor) -> None:
        """Add the update for a bias, ``(C,)``, that the samples of the last update lacked."""
        self.mean.add_(bias.to(self.mean.device), alpha=self.momentum)
