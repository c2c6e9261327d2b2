"""Keep a convolution's halo for its backward pass: a few planes instead of the whole slab.

If both sides have equal numbers of planes, they are one tensor and one copy: ``(B, C, 2, planes, H, W)``. Otherwise
each side with planes is one tensor, ``(B, C, planes, H, W)``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.layout import DIM

__all__ = ["allocate", "copy_planes", "put_back"]


def view_planes(buffer: Tensor, own: tuple[int, int]) -> list[Tensor]:
    """Return views of the halo's planes."""
    before, behind = own
    if before != behind:
        ends = (0, before), (buffer.shape[DIM] - behind, behind)
        return [buffer.narrow(DIM, start, number) for start, number in ends if number]
    if not before:
        return []
    shape, stride = list(buffer.shape), list(buffer.stride())
    shape[DIM : DIM + 1] = 2, before
    stride[DIM : DIM + 1] = (buffer.shape[DIM] - behind) * buffer.stride(DIM), buffer.stride(DIM)
    return [buffer.as_strided(shape, stride, buffer.storage_offset())]


def copy_planes(buffer: Tensor, own: tuple[int, int]) -> list[Tensor]:
    """Copy the halo's planes."""
    return [planes.clone() for planes in view_planes(buffer, own)]


def put_back(buffer: Tensor, own: tuple[int, int], kept: Sequence[Tensor]) -> None:
    """Write the planes back to their places."""
    for planes, copy in zip(view_planes(buffer, own), kept, strict=True):
        planes.copy_(copy)


def allocate(buffer: Tensor, own: tuple[int, int], order: Sequence[int]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return memory for the planes, and each side's part: dense once the dims are permuted to ``order``."""
    before, behind = own
    shape = [buffer.shape[dim] for dim in order]
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    at = list(order).index(DIM)

    def dense(planes: int, *sides: int) -> Tensor:
        shape[at] = planes
        return torch.empty((*sides, *shape), dtype=buffer.dtype, device=buffer.device)

    if before != behind:
        parts = [dense(planes) if planes else None for planes in own]
        return [part.permute(back) for part in parts if part is not None], list(parts)
    if not before:
        return [], [None, None]
    both = dense(before, 2)
    dims = [1 + dim for dim in back]
    return [both.permute([*dims[:DIM], 0, *dims[DIM:]])], list(both.unbind(0))
