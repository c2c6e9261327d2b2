"""Memory of slabs and of planes that join them, in the layout of the slab that they join.

Messages bring planes in torch's default layout. With a slab in channels-last layout, ``torch.cat`` would give all of
them the layout of the messages, and every later operator would keep it.

A slab cut along D that a norm or a join writes gets ``room`` planes in front and behind. A convolution's halo is
received straight into them: nothing is concatenated, and in channels-last layout nothing is packed either. ::

    buffer   | room |        slab        | room |
                 ^-- from the shard before    ^-- from the shard behind; zeros at the volume's border
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.layout import DIM, layout_of


def join_pieces(pieces: Sequence[Tensor], dim: int, like: Tensor) -> Tensor:
    """Return the pieces, at least one, one after the other along ``dim``, in the layout of the slab ``like``."""
    if layout_of(like) is torch.contiguous_format:
        return torch.cat(list(pieces), dim)
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    whole = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout_of(like))
    start = 0
    for piece in pieces:
        whole.narrow(dim, start, piece.shape[dim]).copy_(piece)
        start += piece.shape[dim]
    return whole


def start_total(planes: Tensor, dim: int, size: int, first: int, own: Tensor | None) -> Tensor:
    """Return ``size`` planes along ``dim``, in the layout of ``planes``: ``own`` from ``first`` on, otherwise zeros.

    Parameters
    ----------
    planes
        A slab of the volume that they belong to.
    dim, size
        See above.
    first, own
        Position and values of initial planes, if any.
    """
    shape = list(planes.shape)
    shape[dim] = size
    total = torch.empty(shape, dtype=planes.dtype, device=planes.device, memory_format=layout_of(planes))
    count = 0 if own is None else own.shape[dim]
    if own is not None:
        total.narrow(dim, first, count).copy_(own)
    for start, stop in ((0, first), (first + count, size)):
        if stop > start:
            total.narrow(dim, start, stop - start).zero_()
    return total


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
