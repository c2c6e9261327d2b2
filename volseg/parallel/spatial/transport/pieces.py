"""Join planes of several shards, and return their gradients, in the layout of the slab that they join.

Messages bring planes in torch's default layout. With a slab in channels-last layout, ``torch.cat`` would give all of
them the layout of the messages, and every later operator would keep it.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.layout import layout_of


def join_pieces(
    pieces: Sequence[Tensor], dim: int, like: Tensor, widths: Sequence[int] = (), fill: float = 0.0
) -> Tensor:
    """Return the pieces one after the other along ``dim``, with a margin around them.

    Parameters
    ----------
    pieces
        At least one.
    dim
        Dim along which they are joined.
    like
        The slab whose layout the result has.
    widths, fill
        Margin, in the order of ``F.pad``, and its value.
    """
    if layout_of(like) is torch.contiguous_format and not any(widths):
        return torch.cat(list(pieces), dim)
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    whole, inside = allocate_whole(shape, like, widths, fill)
    start = 0
    for piece in pieces:
        inside.narrow(dim, start, piece.shape[dim]).copy_(piece)
        start += piece.shape[dim]
    return whole


def allocate_whole(
    shape: Sequence[int], like: Tensor, widths: Sequence[int] = (), fill: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return memory of a shape in the layout of ``like``, with a filled margin; and a view of its inside."""
    margins, size = list(_list_margins(len(shape), widths)), list(shape)
    for place, before, after in margins:
        size[place] += before + after
    whole = inside = torch.empty(size, dtype=like.dtype, device=like.device, memory_format=layout_of(like))
    for place, before, after in margins:
        planes = inside.shape[place]
        inside.narrow(place, 0, before).fill_(fill)
        inside.narrow(place, planes - after, after).fill_(fill)
        inside = inside.narrow(place, before, planes - before - after)
    return whole, inside


def pad_slabs(slabs: Sequence[Tensor], widths: Sequence[Sequence[int]], fill: float) -> list[Tensor]:
    """Return each slab with a margin; the slab itself if the margin is empty."""
    return [F.pad(slab, list(own), value=fill) if any(own) else slab for slab, own in zip(slabs, widths, strict=True)]


def view_inside(whole: Tensor, widths: Sequence[int]) -> Tensor:
    """Return a view inside a margin."""
    for place, before, after in _list_margins(whole.ndim, widths):
        whole = whole.narrow(place, before, whole.shape[place] - before - after)
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


def _list_margins(ndim: int, widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each dim that has a margin, and its planes before and behind."""
    for place, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True)):
        if before or after:
            yield ndim - 1 - place, before, after
