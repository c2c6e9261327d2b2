"""Describe a training step independently of the GPUs that run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = Mapping[str, Tensor]
"""Fields with one row per sample."""

Step = Callable[[Batch], Any]
"""Forward, loss, backward and the optimizer's step, on a batch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network and its training step; a trace of a candidate calls these functions under fake tensors.

    Each candidate calls them anew, on its own copy of the network, so candidates do not affect each other.
    """

    build: Callable[[], nn.Module]
    """Returns the plain network, in training mode. The network may be the user's, so a trace runs a fake copy."""
    shape: tuple[int, ...]
    """Shape of the image of a whole batch, (B, C, D, H, W)."""
    make_batch: Callable[[int, torch.device], Batch]
    """Makes a batch of this many rows on a device; ``image`` is the network's input."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    """Returns the optimizer of the placed network, which is its argument."""
    build_step: Callable[[nn.Module, Optimizer], Step]
    """Makes the step of the placed network, and whatever else the step needs (an average of the weights)."""
    precision: torch.dtype
    """Type of the forward pass; ``build_step`` applies it."""
    validate: Callable[[nn.Module], object] | None = None
    """Runs the placed network as the validation between epochs does, on one batch of windows."""
    name: str = "the network"
    """Name of the network in messages."""

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.shape[0]

    @property
    def sides(self) -> tuple[int, ...]:
        """D, H, W of a volume."""
        return self.shape[2:]
