"""Allocate slabs in buffers with room for their halo.

A slab cut along D that a norm or a join writes gets ``room`` planes in front and behind. A convolution's halo is
received straight into them: nothing is concatenated, and in channels-last layout nothing is packed either. ::

    buffer   | room |        slab        | room |
                 ^-- from the shard before    ^-- from the shard behind; zeros at the volume's border
"""

import torch
from torch import Tensor

from volseg.device.layout import DIM, layout_of


def allocate_with_room(like: Tensor, room: int, device: torch.device | None = None) -> Tensor:
    """Return an uninitialised slab like ``like`` with ``room`` planes around it."""
    planes = like.shape[DIM]
    slab = _alias(_allocate(like, planes + 2 * room, device), room, planes)
    # An attribute of the tensor itself, which autograd passes on unchanged; a view or a copy of it has none.
    slab._volseg_room = room  # type: ignore[attr-defined]
    return slab


def get_halo_room(slab: Tensor) -> int:
    """Return the planes of room around a slab: zero unless it was allocated with room, and for views."""
    return getattr(slab, "_volseg_room", 0)


def extend(slab: Tensor, room: int, own: tuple[int, int]) -> Tensor:
    """Return the slab and the planes around it: in its own memory if there is room, otherwise in a copy."""
    before, behind = own
    planes = before + slab.shape[DIM] + behind
    if room >= max(own):
        return _alias(slab, -before, planes)
    buffer = _allocate(slab, planes)
    own_planes(buffer, own).copy_(slab)
    return buffer


def own_planes(buffer: Tensor, own: tuple[int, int]) -> Tensor:
    """Return the slab's own planes, without its halo."""
    return buffer.narrow(DIM, own[0], buffer.shape[DIM] - sum(own))


def _alias(tensor: Tensor, offset: int, planes: int) -> Tensor:
    """Return planes around ``tensor`` in its own memory; autograd, which must not see the room, sees no view."""
    shape = list(tensor.shape)
    shape[DIM] = planes
    start = tensor.storage_offset() + offset * tensor.stride(DIM)
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, shape, tensor.stride())


def _allocate(like: Tensor, planes: int, device: torch.device | None = None) -> Tensor:
    shape = list(like.shape)
    shape[DIM] = planes
    return torch.empty(shape, dtype=like.dtype, device=device or like.device, memory_format=layout_of(like))
