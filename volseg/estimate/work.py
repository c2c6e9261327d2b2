"""A training step, before anybody has said who runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Batch", "Step", "Work"]

Batch = Mapping[str, Tensor]
"""Fields with a row for each sample."""

Step = Callable[[Batch], Any]
"""Forward, loss, backward and the optimizer's step, on a batch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, and how; a trace of a candidate calls these under fake tensors.

    They are called anew for each candidate, on a copy of the network: nothing that one of them does reaches another.
    """

    build: Callable[[], nn.Module]
    """Returns the plain network, in training mode; a trace runs a copy without values, as it may be the user's."""
    shape: tuple[int, ...]
    """Of the image of a whole batch, (B, C, D, H, W)."""
    make_batch: Callable[[int, torch.device], Batch]
    """Makes so many rows of a batch on a device; ``image`` is what the network takes."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    """Over the parameters of the placed network, which it is called with."""
    build_step: Callable[[nn.Module, Optimizer], Step]
    """Makes the step of the placed network; whatever that needs besides (an average of the weights) is made here."""
    precision: torch.dtype
    """In which the forward pass is computed; ``build_step`` sees to it."""
    validate: Callable[[nn.Module], object] | None = None
    """Runs the placed network as a validation between epochs does, on as much as goes through it at a time."""
    name: str = "the network"
    """Of the network, for messages."""

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.shape[0]

    @property
    def sides(self) -> tuple[int, ...]:
        """D, H, W of a volume."""
        return self.shape[2:]
