"""Tensors that are sent together: parameters in buckets, gradients in one piece of memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fill_buckets", "flatten", "read_layout", "split_like"]

BUCKET_BYTES = 16 * 2**20
"""Gradients summed in one call: large enough for the links' full speed, small enough to start early."""

FIRST_BUCKET_BYTES = 2**20
"""Of the first parameters, whose gradients come last: nothing is left to hide their sum behind."""


def fill_buckets(parameters: Sequence[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Put neighbouring parameters of one dtype into buckets of at most ``limit`` bytes, or of one parameter.

    The first is smaller: see ``FIRST_BUCKET_BYTES``.
    """
    result: list[list[Tensor]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        room = min(limit, FIRST_BUCKET_BYTES) if len(result) == 1 else limit
        if not result or filled + size > room or result[-1][0].dtype != parameter.dtype:
            result.append([])
            filled = 0
        result[-1].append(parameter)
        filled += size
    return result


def flatten(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], further: Tensor | None = None) -> Tensor:
    """Return gradients in one piece, each in the layout of its parameter, None as zeros.

    The layouts do not depend on the gradients: a library may lay out those of other processes in another way.

    Parameters
    ----------
    gradients, parameters
        In the same order.
    further
        Values behind them.
    """
    pairs = list(zip(gradients, parameters, strict=True))
    missing = [parameter.numel() for gradient, parameter in pairs if gradient is None]
    zeros = parameters[0].new_zeros(max(missing, default=0))  # made once: what is missing is copied from there
    parts = [
        zeros.narrow(0, 0, parameter.numel()) if gradient is None else _lie_like(gradient, parameter)
        for gradient, parameter in pairs
    ]
    return torch.cat(parts if further is None else [*parts, further])


def split_like(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the pieces of ``flatten``, each in the shape and layout of its parameter."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [
        part.as_strided(parameter.shape, read_layout(parameter), part.storage_offset())
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _lie_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    layout = read_layout(parameter)
    sides = zip(gradient.shape, gradient.stride(), layout, strict=True)
    if any(size > 1 and own != wanted for size, own, wanted in sides):
        gradient = gradient.new_empty_strided(gradient.shape, layout).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def read_layout(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: its parameter's where that has no gaps in memory, as torch does it."""
    return parameter.stride() if parameter.is_contiguous() else torch.empty_like(parameter, device="meta").stride()
