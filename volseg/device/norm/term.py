"""One of two things that are added: a norm with its activation, or a slab as it is."""

from typing import NamedTuple

from torch import Tensor

from volseg.device.norm.activation import IDENTITY, Activation

__all__ = ["Term"]


class Term(NamedTuple):
    """One of the two: ``activation(slab * scale + shift)``, or the slab itself where scale and shift are None."""

    slab: Tensor
    mean: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: Activation = IDENTITY
    slope: Tensor | None = None

    @property
    def is_norm(self) -> bool:
        """Whether it is scaled and shifted."""
        return self.scale is not None
