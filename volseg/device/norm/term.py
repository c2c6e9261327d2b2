"""One of two added terms: a norm with its activation, or a plain slab."""

from typing import NamedTuple

from torch import Tensor

from volseg.device.norm.activation import IDENTITY, Activation

__all__ = ["Term"]


class Term(NamedTuple):
    """A term of a sum: ``activation(slab * scale + shift)``, or the slab itself if scale and shift are None."""

    slab: Tensor
    mean: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: Activation = IDENTITY
    slope: Tensor | None = None

    @property
    def is_norm(self) -> bool:
        """Whether the term is scaled and shifted."""
        return self.scale is not None
