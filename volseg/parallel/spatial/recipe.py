"""How slabs follow from tensors that are kept in their place, and what stands for slabs that were not written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Outline", "Recipe", "Write", "outline_slab"]

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
