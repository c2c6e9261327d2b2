"""How to compute a slab again from tensors that are kept anyway.

A convolution must keep its input for the gradient of its weights. Where that input is a norm and an activation
applied to a convolution's output, which the norm keeps already, it keeps this *recipe* instead: one pass over memory
in the backward pass for half of the activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from volseg.parallel.sharding import kernels

__all__ = ["Joined", "Kept", "Normalized", "Recipe"]


class Recipe(Protocol):
    """Computes a slab again."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it needs, to be saved for the backward pass."""

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write the slab into ``out``, from ``tensors`` as they were saved."""


@dataclass(frozen=True, slots=True)
class Normalized:
    """Scale, shift and activation of a convolution's output."""

    tensors: tuple[Tensor, ...]
    activation: kernels.Activation

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Apply them again."""
        slab, scale, shift = tensors
        kernels.affine(slab, scale, shift, self.activation, out)


@dataclass(frozen=True, slots=True)
class Kept:
    """A slab that somebody keeps as it is."""

    tensors: tuple[Tensor, ...]

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Copy it."""
        kernels.copy(tensors[0], out)


@dataclass(frozen=True, slots=True)
class Joined:
    """Channels of several slabs, one behind the other."""

    parts: tuple[Recipe, ...]
    channels: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the parts need."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def write(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write each part into its channels."""
        first = used = 0
        for part, count in zip(self.parts, self.channels, strict=True):
            own = tensors[used : used + len(part.tensors)]
            part.write(own, out.narrow(1, first, count))
            first, used = first + count, used + len(own)
