"""A norm's term of a sum, and the activation after a norm, computed in the same pass over the voxels."""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation after a norm: ``parameter`` is leaky ReLU's slope or ELU's alpha.

    PReLU's slope is a tensor, of one value or one per channel, and is passed separately.
    """

    kind: Literal["none", "leaky", "elu", "prelu", "sigmoid", "silu", "gelu"] = "none"
    parameter: float = 0.0

    def apply(self, x: Tensor, slope: Tensor | None = None) -> Tensor:
        """Return the activated tensor."""
        if self.kind == "leaky":
            return F.leaky_relu(x, self.parameter)
        if self.kind == "elu":
            return F.elu(x, self.parameter)
        if self.kind == "prelu":
            assert slope is not None
            return F.prelu(x, slope.to(x))
        return x if self.kind == "none" else SMOOTH[self.kind](x)

    def derivative(self, x: Tensor, slope: Tensor | None = None) -> Tensor:
        """Return the derivative at ``x``, the value before activation."""
        if self.kind == "leaky":
            # Not torch.where of two numbers: its result is float32 for any type of x.
            return torch.ones_like(x).masked_fill_(x <= 0, self.parameter)
        if self.kind == "prelu":
            assert slope is not None
            return torch.where(x > 0, torch.ones_like(x), slope.to(x).reshape(-1, *([1] * (x.ndim - 2))))
        if self.kind == "elu":
            return torch.where(x > 0, 1.0, self.parameter * x.exp())
        return torch.ones_like(x) if self.kind == "none" else _differentiate_smooth(self.kind, x)


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu}


def _differentiate_smooth(kind: str, x: Tensor) -> Tensor:
    if kind == "gelu":
        return (1 + torch.erf(x / sqrt(2))) / 2 + x * torch.exp(-x * x / 2) / sqrt(2 * pi)
    part = torch.sigmoid(x)
    return part * (1 - part) if kind == "sigmoid" else part * (1 + x * (1 - part))


IDENTITY = Activation()


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

    @property
    def affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of a norm."""
        assert self.scale is not None
        assert self.shift is not None
        return self.scale, self.shift
