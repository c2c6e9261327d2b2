"""Join planes of several shards, and return their gradients, in the layout of the slab that they join.

Messages bring planes in torch's default layout. With a slab in channels-last layout, ``torch.cat`` would give all of
them the layout of the messages, and every later operator would keep it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.layout import layout_of


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
