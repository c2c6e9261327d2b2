"""Choose how norms are computed: by Triton's kernels if they support the slab, otherwise by plain torch.

Plain torch defines the results. A second term may be added to a norm, with an activation of the sum, in one pass:
residual blocks compute ``act(first + second)``. The first term is a norm with its own activation, and the second is
another norm, or a plain slab. Backward takes two passes, like a norm: the sums, and the gradients of both.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from volseg.device.norm import addition_passes, gathered, passes, reference, statistics
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.device.norm.exchanged import exchange_backward_coefficients, exchange_coefficients
from volseg.device.norm.reference import backward_coefficients, coefficients
from volseg.device.triton_tiles import takes

__all__ = [
    "add",
    "add_gradients",
    "add_sums",
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


def add(
    first: Term,
    second: Term | None,
    activation: Activation = IDENTITY,
    out: Tensor | None = None,
    ends: tuple[int, int] | None = None,
) -> Tensor:
    """Return ``activation(first + second)``, rounded once; in ``out`` if given.

    Parameters
    ----------
    first
        A norm.
    second
        Another norm, or a plain slab; of the first one's shape. The sum has the type that torch gives a sum of both: a
        norm in half precision plus a slab in float32 is float32. With None only the norm is computed, without
        activation.
    activation
        Activation of the sum; no PReLU.
    out
        Memory of the sum's shape and type.
    ends
        Ends of a norm without a second term: see ``reference.affine``.
    """
    if second is None:
        return affine(first.slab, *first.affine, first.activation, out, ends, first.slope)
    if takes(first.slab):
        return addition_passes.add(first, second, activation, out)
    dtype = torch.promote_types(first.slab.dtype, second.slab.dtype)
    result = activation.apply(_compute(first) + _compute(second)).to(dtype)
    return result if out is None else out.copy_(result)


def _compute(term: Term) -> Tensor:
    """Return a term's value in plain torch, half precision as float32."""
    half = term.slab.dtype in (torch.float16, torch.bfloat16)
    wide = term.slab.float() if half else term.slab
    return reference.affine(wide, *term.affine, term.activation, slope=term.slope) if term.is_norm else wide


def _passes_on(second: Term, activation: Activation) -> bool:
    """Return whether the second term gets the sum's gradient unchanged, and the first one the gradient of a norm."""
    return not second.is_norm and activation == IDENTITY


def _differentiate(gradient: Tensor, first: Term, second: Term, activation: Activation) -> Tensor:
    """Return the sum's gradient in plain torch."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return wide if activation.kind == "none" else wide * activation.derivative(_compute(first) + _compute(second))


def add_sums(gradient: Tensor, first: Term, second: Term | None, activation: Activation) -> list[Tensor]:
    """Return ``reference.gradient_sums`` of each norm among the terms, for each part, ``(parts, 2 or 3, B, C)``.

    Parameters
    ----------
    gradient
        Gradient of the result.
    first, second, activation
        See ``add``.
    """
    if second is None or _passes_on(second, activation):
        return [gradient_sums_of_parts(gradient, *first)]  # type: ignore[arg-type]  # a norm has them all
    norms = [term for term in (first, second) if term.is_norm]
    if not takes(first.slab):
        inner = _differentiate(gradient, first, second, activation)
        return [reference.gradient_sums(inner, *term).unsqueeze(0) for term in norms]  # type: ignore[arg-type]
    return addition_passes.add_sums(gradient, first, second, activation)


def add_gradients(
    gradient: Tensor,
    first: Term,
    second: Term | None,
    found: list[tuple[Tensor, Tensor]],
    activation: Activation,
    outs: Sequence[Tensor | None] = (None, None),
    *,
    both: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of both slabs; those of norms in ``outs`` if given.

    Parameters
    ----------
    gradient
        Gradient of the result.
    first, second, activation
        See ``add``.
    found
        Factor and offset of each norm among the terms: see ``reference.gradient_input``.
    outs
        Memory of the slabs' shapes and types.
    both
        Whether a second term that is no norm needs a gradient; otherwise its gradient is None.
    """
    if second is None or _passes_on(second, activation):
        own = gradient_input(
            gradient, first.slab, *first.affine, *found[0], first.activation, out=outs[0], slope=first.slope
        )
        return own, gradient if both else None
    if not takes(first.slab):
        inner = _differentiate(gradient, first, second, activation)
        slabs = [
            reference.gradient_input(inner, term.slab, *term.affine, *own, term.activation, out=out, slope=term.slope)
            for term, own, out in zip((first, second), found, outs, strict=False)
            if term.is_norm
        ]
        if second.is_norm:
            return slabs[0], slabs[1]
        return slabs[0], inner.to(second.slab.dtype) if both else None
    return addition_passes.add_gradients(gradient, first, second, found, activation, outs, both=both)
