"""Some kernels in plain torch, which tests compare with and use in place of a GPU's."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.attention import Addend
from volseg.device.upsample2x import DoubledPart


def attend(query: Tensor, key: Tensor, value: Tensor, terms: Sequence[Addend], scale: float) -> tuple[Tensor, Tensor]:
    """Compute ``attention.attend``."""
    scores = (query @ key.transpose(-2, -1)).flatten(0, 1) * scale
    places = torch.arange(len(scores), device=query.device)
    for term in terms:
        scores = scores + term.values[places // term.every % term.count]
    weights = torch.softmax(scores, -1).to(value.dtype).unflatten(0, query.shape[:2])
    return weights @ value, torch.logsumexp(scores, -1)


def differentiate_attention(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, terms: Sequence[Addend],
    scale: float, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Compute ``attention.differentiate``."""
    del out, logs
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        values = [term.values.detach().requires_grad_(own) for term, own in zip(terms, wanted, strict=True)]
        own_terms = [Addend(own, term.every, term.count) for own, term in zip(values, terms, strict=True)]
        again, _ = attend(leaves[0], leaves[1], leaves[2], own_terms, scale)
        found = torch.autograd.grad(again, [*leaves, *(own for own in values if own.requires_grad)], gradient)
    slopes = iter(found[3:])
    return found[0], found[1], found[2], [next(slopes) if own else None for own in wanted]


def differentiate_product(gradient: Tensor, slab: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``broadcast_mul.differentiate``."""
    return gradient * gate, (gradient * slab).sum(1, keepdim=True)


def double(slab: Tensor, part: DoubledPart, linear: bool) -> Tensor:
    """Compute ``upsample2x.double``."""
    wide = slab.float() if slab.dtype in (torch.float16, torch.bfloat16) else slab
    # The rest of the volume may have any values: no requested plane reads it.
    behind = part.planes - part.first - slab.shape[2]
    doubled = F.interpolate(
        F.pad(wide, (0, 0, 0, 0, part.first, behind)), scale_factor=2, mode="trilinear" if linear else "nearest"
    )
    return doubled[:, :, slice(*part.outputs)].to(slab.dtype)
