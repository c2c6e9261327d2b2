"""The function behind a norm, computed in the same pass over the voxels."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IDENTITY", "Activation"]


@dataclass(frozen=True, slots=True)
class Activation:
    """A function applied behind the norm: ``parameter`` is leaky ReLU's slope or ELU's alpha."""

    kind: Literal["none", "leaky", "elu"] = "none"
    parameter: float = 0.0

    def apply(self, x: Tensor) -> Tensor:
        """Return the activated tensor."""
        if self.kind == "leaky":
            return F.leaky_relu(x, self.parameter)
        return F.elu(x, self.parameter) if self.kind == "elu" else x

    def derivative(self, x: Tensor) -> Tensor:
        """Return the derivative at ``x``, the value before activation."""
        if self.kind == "leaky":
            # Not torch.where of two numbers: its result is float32 whatever x is.
            return torch.ones_like(x).masked_fill_(x <= 0, self.parameter)
        return torch.where(x > 0, 1.0, self.parameter * x.exp()) if self.kind == "elu" else torch.ones_like(x)


IDENTITY = Activation()
