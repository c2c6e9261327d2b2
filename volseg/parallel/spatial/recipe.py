"""Recipes that write slabs from tensors which are kept instead, and outlines of slabs that were not written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

Write = Callable[[Sequence[Tensor], Tensor, int], None]
"""Writes, from saved tensors, the planes of a slab that start at the given plane and fill ``out``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors, and a function that writes slabs from them.

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
        """Tensors of all slabs."""
        return tuple(tensor for row in self.rows for tensor in row)


Outline = tuple[list[Tensor], Recipe, torch.memory_format]
"""Slabs that were not written: tensors of their shapes in the memory of one element (see ``outline_slab``), with their
history; their recipe; and their layout."""


def outline_slab(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a slab's shape in the memory of one element."""
    return torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=device)


def split_rows(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Return rows of so many tensors each, from tensors that were saved in one sequence."""
    rest = iter(tensors)
    return [tuple(islice(rest, size)) for size in sizes]


class Asked(NamedTuple):
    """Which gradients of a convolution are wanted."""

    input: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, ctx: Any, count: int) -> "Asked":
        """Return which gradients an autograd function is asked for.

        It gets one argument, a weight for each of ``count`` slabs, ``ctx.num_biases`` biases, and the inputs.
        """
        first_input = 1 + count + ctx.num_biases
        needed = ctx.needs_input_grad
        return cls(any(needed[first_input:]), needed[1], any(needed[1 + count : first_input]))


def mask_asked(ctx: Any, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of the last arguments, None for those that are not wanted."""
    pairs = zip(ctx.needs_input_grad[-len(inputs) :], inputs, strict=True)
    return [value if asked else None for asked, value in pairs]


def add_in_float32(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return a total, None at first, plus a part, None where no gradient is wanted; half precision is widened."""
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    return wide if total is None else total + wide
