"""Networks made of a function, for tests that need a ``forward`` and little else."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


class WithLayers(nn.Module):
    """Layers by name, and a function of them and the inputs as ``forward``."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.layers, *inputs)
