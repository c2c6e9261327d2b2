"""How to compute a slab again from tensors that are kept anyway.

A convolution must keep its input for the gradient of its weights. Where that input is a norm and an activation
applied to a convolution's output, which the norm keeps already, it keeps this *recipe* instead: one pass over memory
in the backward pass for half of the activations.

What is written is apart from the tensors it is written from: autograd keeps the tensors, where hooks can see them
(recomputation forgets them, offloading moves them), and the operator keeps ``write`` alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from volseg.device.dims import DIM
from volseg.device.norm import choice

__all__ = ["Copy", "Join", "Normalize", "Recipe", "Write", "joined", "kept", "normalized"]

Write = Callable[[Sequence[Tensor], Tensor, int], None]
"""Writes, from tensors as they were saved, the planes of a slab that start at the given one and fill ``out``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tensors, and how a slab follows from them."""

    tensors: tuple[Tensor, ...]
    write: Write


def _planes(slab: Tensor, start: int, out: Tensor) -> Tensor:
    count = out.shape[DIM]
    return slab if slab.shape[DIM] == count else slab.narrow(DIM, start, count)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scale, shift and activation of a convolution's output."""

    activation: choice.Activation

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Apply them again."""
        slab, scale, shift = tensors
        choice.affine(_planes(slab, start, out), scale, shift, self.activation, out)


@dataclass(frozen=True, slots=True)
class Copy:
    """A slab that somebody keeps as it is."""

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Copy it."""
        choice.copy(_planes(tensors[0], start, out), out)


@dataclass(frozen=True, slots=True)
class Join:
    """Channels of several slabs, one behind the other: each one's ``write``, its number of tensors and of channels."""

    writes: tuple[Write, ...]
    counts: tuple[int, ...]
    channels: tuple[int, ...]

    def __call__(self, tensors: Sequence[Tensor], out: Tensor, start: int = 0) -> None:
        """Write each part into its channels."""
        for write, own, (first, count) in self.parts(tensors):
            write(own, out.narrow(1, first, count), start)

    def parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Write, Sequence[Tensor], tuple[int, int]]]:
        """Yield how to write each part, its tensors, and its first channel and number of channels."""
        first = used = 0
        for write, number, count in zip(self.writes, self.counts, self.channels, strict=True):
            yield write, tensors[used : used + number], (first, count)
            first, used = first + count, used + number


def normalized(slab: Tensor, scale: Tensor, shift: Tensor, activation: choice.Activation) -> Recipe:
    """Return the recipe of a norm's result, with the activation behind it."""
    return Recipe((slab, scale, shift), Normalize(activation))


def kept(slab: Tensor) -> Recipe:
    """Return the recipe of a slab that somebody keeps."""
    return Recipe((slab,), Copy())


def joined(parts: Sequence[Recipe], channels: Sequence[int]) -> Recipe:
    """Return the recipe of slabs side by side; parts that are joins themselves are taken apart."""
    writes: list[Write] = []
    counts: list[int] = []
    widths: list[int] = []
    for part, width in zip(parts, channels, strict=True):
        if isinstance(part.write, Join):
            writes += part.write.writes
            counts += part.write.counts
            widths += part.write.channels
        else:
            writes.append(part.write)
            counts.append(len(part.tensors))
            widths.append(width)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Recipe(tensors, Join(tuple(writes), tuple(counts), tuple(widths)))
