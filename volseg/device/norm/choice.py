"""Choose how norms are computed: by Triton's kernels if they support the slab, otherwise by plain torch.

Plain torch defines the results. A second term may be added to a norm, with an activation of the sum, in one pass:
residual blocks compute ``act(first + second)``. The first term is a norm with its own activation, and the second is
another norm, or a plain slab. Backward takes two passes, like a norm: the sums, and the gradients of both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.norm import addition_passes, gathered, passes, reference, statistics
from volseg.device.norm.activation import IDENTITY, Activation, Term
from volseg.device.triton_tiles import takes


def moments(slab: Tensor) -> Tensor:
    """Compute ``reference.moments``."""
    return statistics.moments(slab) if takes(slab) else reference.moments(slab)


def affine(term: Term, out: Tensor | None = None, ends: tuple[int, int] | None = None) -> Tensor:
    """Compute ``reference.affine``.

    Parameters
    ----------
    term, out, ends
        See ``reference.affine``.
    """
    return passes.affine(term, out, ends) if takes(term.slab) else reference.affine(term, out, ends)


def gradient_input(gradient: Tensor, term: Term, factor: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``reference.gradient_input``.

    Parameters
    ----------
    gradient, term, factor, offset, out
        See ``reference.gradient_input``.
    """
    compute = passes.gradient_input if takes(term.slab) else reference.gradient_input
    return compute(gradient, term, factor, offset, out)


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


def gradient_sums_of_parts(gradient: Tensor, term: Term) -> Tensor:
    """Return ``reference.gradient_sums`` of each part of a slab, ``(parts, 2 or 3, B, C)``.

    Parameters
    ----------
    gradient, term
        See ``reference.gradient_sums``.
    """
    if takes(term.slab):
        return passes.gradient_sums(gradient, term)
    return reference.gradient_sums(gradient, term).unsqueeze(0)


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
        return affine(first, out, ends)
    if takes(first.slab):
        return addition_passes.add(first, second, activation, out)
    dtype = torch.promote_types(first.slab.dtype, second.slab.dtype)
    result = activation.apply(_compute(first) + _compute(second)).to(dtype)
    return result if out is None else out.copy_(result)


def _compute(term: Term) -> Tensor:
    """Return a term's value in plain torch, half precision as float32."""
    half = term.slab.dtype in (torch.float16, torch.bfloat16)
    wide = term.slab.float() if half else term.slab
    return reference.affine(term._replace(slab=wide)) if term.is_norm else wide


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
        return [gradient_sums_of_parts(gradient, first)]
    norms = [term for term in (first, second) if term.is_norm]
    if not takes(first.slab):
        inner = _differentiate(gradient, first, second, activation)
        return [reference.gradient_sums(inner, term).unsqueeze(0) for term in norms]
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
        Whether a second term that is not a norm needs a gradient; otherwise its gradient is None.
    """
    if second is None or _passes_on(second, activation):
        own = gradient_input(gradient, first, *found[0], outs[0])
        return own, gradient if both else None
    if not takes(first.slab):
        inner = _differentiate(gradient, first, second, activation)
        slabs = [
            reference.gradient_input(inner, term, *own, out)
            for term, own, out in zip((first, second), found, outs, strict=False)
            if term.is_norm
        ]
        if second.is_norm:
            return slabs[0], slabs[1]
        return slabs[0], inner.to(second.slab.dtype) if both else None
    return addition_passes.add_gradients(gradient, first, second, found, activation, outs, both=both)
