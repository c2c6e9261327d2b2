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
