"""Planes of a volume between direct neighbours by mailbox, where GPUs see each other's memory and little is sent.

What a message of NCCL needs beside its way (a stream of its own, copies on both sides) takes longer than small planes
travel. Here they go out from where they lie and arrive where they are read. Which way they travel follows from sizes
that all shards have in common, never from how a slab lies in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.device.gpus import is_recording
from volseg.device.peer.planes import EAGER_LIMIT, LIMIT, PlaneMailbox, small_enough
from volseg.parallel.spatial.plan.shards import Span, Transfer
from volseg.parallel.spatial.transport.pieces import allocate_whole, start_total

__all__ = ["fetch_near", "give_back_near", "is_near"]


def is_near(moves: Sequence[Transfer], slab: Tensor, dim: int) -> bool:
    """Say whether planes move between direct neighbours alone, and few enough for the mailbox; all shards say the same.

    Parameters
    ----------
    moves
        Of all shards.
    slab, dim
        A slab of the volume, and the dim along which it is cut.
    """
    apart = [move for move in moves if move.source != move.target]
    pairs = {(move.source, move.target) for move in apart}
    if len(pairs) < len(apart) or any(abs(source - target) > 1 for source, target in pairs):
        return False
    widest = max((move.stop - move.start for move in apart), default=0)
    values = slab.shape[:dim].numel() * slab.shape[dim + 1 :].numel()
    return widest > 0 and small_enough(widest, values, slab.dtype, LIMIT if is_recording(slab.device) else EAGER_LIMIT)


def fetch_near(
    box: PlaneMailbox,
    here: int,
    moves: Sequence[Transfer],
    slab: Tensor,
    dim: int,
    own: Span,
    widths: Sequence[int],
    fill: float,
) -> Tensor:
    """Return the planes that a shard wants, with a margin around them, outside autograd.

    Parameters
    ----------
    box
        The mailbox of the shards.
    here
        The shard.
    moves
        Of all shards.
    slab, dim, own
        What the shard has, the dim along which it is cut, and where it lies in the volume.
    widths, fill
        Of the margin: see ``Communicator.fetch_padded``.
    """
    shape = list(slab.shape)
    shape[dim] = sum(move.stop - move.start for move in moves if move.target == here)
    whole, inside = allocate_whole(shape, slab, widths, fill)
    sends: list[Tensor | None] = [None, None]
    receives: list[Tensor | None] = [None, None]
    kept = []
    for move in moves:
        count = move.stop - move.start
        planes = slab.narrow(dim, move.start - own[0], count) if move.source == here else None
        if move.target != here:
            if planes is not None:
                sends[move.target > here] = planes
            continue
        place = inside.narrow(dim, move.place, count)
        if planes is None:
            receives[move.source > here] = place
        else:
            kept.append((place, planes))
    wait = box.start(sends, receives)
    for place, planes in kept:
        place.copy_(planes)
    wait()
    return whole


def give_back_near(
    box: PlaneMailbox,
    here: int,
    moves: Sequence[Transfer],
    planes: Tensor,
    dim: int,
    own: Span,
) -> Tensor:
    """Return every plane to its owner and add what comes back: the transpose of `fetch_near`.

    Parameters
    ----------
    box, here, moves, dim, own
        See `fetch_near`.
    planes
        What the shard had fetched.
    """
    shape = list(planes.shape)
    sends: list[Tensor | None] = [None, None]
    receives: list[Tensor | None] = [None, None]
    kept: list[tuple[int, Tensor]] = []
    arrivals: list[tuple[int, Tensor]] = []
    for move in moves:
        count = move.stop - move.start
        if move.target == here:
            piece = planes.narrow(dim, move.place, count)
            if move.source == here:
                kept.append((move.start - own[0], piece))
            else:
                sends[move.source > here] = piece
        elif move.source == here:
            shape[dim] = count
            arrival = receives[move.target > here] = torch.empty(shape, dtype=planes.dtype, device=planes.device)
            arrivals.append((move.start - own[0], arrival))
    wait = box.start(sends, receives)
    total = start_total(planes, dim, own[1] - own[0], *(kept.pop(0) if kept else (0, None)))
    wait()
    for start, piece in (*kept, *arrivals):
        total.narrow(dim, start, piece.shape[dim]).add_(piece)
    return total
