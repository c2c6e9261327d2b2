"""Choose how a norm is computed: by Triton's kernels if they support the slab, otherwise by plain torch."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from volseg.device.norm import gathered, passes, reference, statistics
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.norm.exchanged import exchange_backward_coefficients, exchange_coefficients
from volseg.device.norm.reference import backward_coefficients, coefficients
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
    "gradient_sums_of_parts",
    "moments",
    "takes",
]

Asked = ParamSpec("Asked")


def _choose(kernels: Callable[Asked, Tensor], plain: Callable[Asked, Tensor], *, slab: int) -> Callable[Asked, Tensor]:
    """Return a function that computes ``plain``, by kernels if they support its argument number ``slab``."""

    @wraps(plain)
    def compute(*args: Asked.args, **kwargs: Asked.kwargs) -> Tensor:
        given: Any = args[slab]
        return (kernels if takes(given) else plain)(*args, **kwargs)

    return compute


moments = _choose(statistics.moments, reference.moments, slab=0)
affine = _choose(passes.affine, reference.affine, slab=0)
gradient_input = _choose(passes.gradient_input, reference.gradient_input, slab=1)


def compute_shares(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each shard's share of the voxels, ``(shards, 1, 1)``."""
    voxels = torch.tensor(counts, dtype=torch.float64)
    return (voxels / voxels.sum()).to(dtype).reshape(-1, 1, 1).to(device)


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
