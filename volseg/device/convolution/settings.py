"""Arguments of a convolution besides its tensors, and the volume that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


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

    def compute_sides(self, slab: Tensor, weight: Tensor) -> list[int]:
        """Return the output's sides D, H, W; the convolution is neither dilated nor transposed."""
        around = zip(slab.shape[2:], self.padding, weight.shape[2:], self.stride, strict=True)
        return [(side + 2 * p - k) // s + 1 for side, p, k, s in around]

    def turn(self, weight: Tensor) -> "Settings":
        """Return the settings of the convolution from the output back to the input, whose weight is flipped."""
        along = zip(weight.shape[2:], self.dilation, self.padding, strict=True)
        return replace(self, padding=tuple((side - 1) * step - around for side, step, around in along))


def new_volume(like: Tensor, channels: int, sides: Sequence[int]) -> Tensor:
    """Return uninitialised memory for a volume with channels last, with the samples and the type of another one."""
    shape = (like.shape[0], channels, *sides)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d)
