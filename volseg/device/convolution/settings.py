"""Arguments of a convolution besides its tensors."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Arguments of ``torch.ops.aten.convolution`` besides the tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments in torch's order."""
        return (
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.transposed,
            list(self.output_padding),
            self.groups,
        )
