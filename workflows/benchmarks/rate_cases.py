"""What is timed to know a GPU: calls on tensors of their own, each with the ``KernelRun`` that a trace would hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.estimate.trace import KernelRun

__all__ = ["LAYOUTS", "Layout", "Prepared", "RateCase", "count_run", "draw", "name_layout"]

Prepared = tuple[KernelRun, Callable[[], object]]
"""What is counted, and the call that does it."""


@dataclass(frozen=True)
class RateCase:
    """Calls on one set of tensors."""

    name: str
    size: int
    """Bytes of its tensors, about."""
    prepare: Callable[[torch.device], list[Prepared]]
    """Makes the tensors."""


Layout = tuple[torch.dtype, bool]
"""Type of the tensors, and whether channels are last."""

LAYOUTS: tuple[Layout, ...] = (
    (torch.bfloat16, True),
    (torch.bfloat16, False),
    (torch.float32, False),
    (torch.float32, True),
    (torch.float16, True),
    (torch.float16, False),
)


def draw(device: torch.device, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return noise: zeros would let matrix units run at a higher clock."""
    layout = torch.channels_last_3d if channels_last and len(shape) == 5 else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout).normal_()


def count_run(
    name: str, dtype: torch.dtype, tensors: Sequence[Tensor], channels_last: bool = False, flops: int = 0
) -> KernelRun:
    """Return what a trace would hold of a kernel that reads or writes each tensor once."""
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return KernelRun(name, dtype, flops, moved, shapes, channels_last)


def name_layout(layout: Layout) -> str:
    """Return the layout in words."""
    dtype, last = layout
    return f"{str(dtype).removeprefix('torch.')}, {'channels last' if last else 'contiguous'}"
