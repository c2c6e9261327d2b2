"""How slabs follow from tensors that are kept in their place, and what stands for slabs that were not written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outline", "Recipe", "Write", "add_in_float32", "find_asked", "mask_asked", "outline_slab", "split_rows"]

Write = Callable[[Sequence[Tensor], Tensor, int], None]
"""Writes, from tensors as they were saved, the planes of a slab that start at the given one and fill ``out``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors, and how slabs follow from them.

    Attributes
    ----------
    rows
        The tensors of each slab.
    write
        Writes a slab from its row.
    """

    rows: tuple[tuple[Tensor, ...], ...]
    write: Write

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of all slabs."""
        return tuple(tensor for row in self.rows for tensor in row)


@dataclass(frozen=True, slots=True)
class Outline:
    """Slabs that were not written.

    Attributes
    ----------
    slabs
        Tensors of their shapes in the memory of one element (see ``outline_slab``), with their history.
    recipe
        How to write them.
    layout
        In which they are to lie.
    """

    slabs: list[Tensor]
    recipe: Recipe
    layout: torch.memory_format


def outline_slab(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a slab's shape in the memory of one element."""
    return torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=device)


def split_rows(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return rows of so many tensors each, which were saved one behind the other."""
    rest = iter(tensors)
    return [tuple(islice(rest, size)) for size in sizes]


def find_asked(ctx: Any, count: int) -> tuple[bool, bool, bool]:
    """Return whether gradients of inputs, weight and bias are asked for.

    The function of ``ctx`` gets one argument, a weight for each of ``count`` slabs, ``ctx.num_biases`` biases, and the
    inputs.
    """
    needed, first = ctx.needs_input_grad, 1 + count + ctx.num_biases
    return any(needed[first:]), needed[1], any(needed[1 + count : first])


def mask_asked(ctx: Any, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the last arguments, None for those that nobody asks for."""
    pairs = zip(ctx.needs_input_grad[-len(inputs) :], inputs, strict=True)
    return [value if asked else None for asked, value in pairs]


def add_in_float32(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the sum of a total, None at first, and a part, None where none is asked for; half precision widened."""
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    return wide if total is None else total + wide
