"""Planes of a volume between direct neighbours by mailbox, where GPUs see each other's memory and little is sent.

What a message of NCCL needs beside its way (a stream of its own, copies on both sides) takes longer than small planes
travel. Here they go out from where they lie and arrive where they are read. Which way they travel follows from sizes
that all shards have in common, never from how a slab lies in memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volseg.device.gpus import is_recording
from volseg.device.peer.planes import EAGER_LIMIT, LIMIT, PlaneMailbox, small_enough
from volseg.parallel.spatial.plan.shards import Transfer

__all__ = ["NearPlanes", "is_near"]


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


class NearPlanes:
    """Planes of one exchange by mailbox, as `Messages` has those by message.

    Parameters
    ----------
    box
        The mailbox of the shards.
    here, device
        The shard, and where it is.
    """

    def __init__(self, box: PlaneMailbox, here: int, device: torch.device) -> None:
        self._box, self._here, self._device = box, here, device
        self._sends: list[Tensor | None] = [None, None]
        self._receives: list[Tensor | None] = [None, None]

    def make_room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return dense memory for what is received."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def send(self, planes: Tensor, position: int) -> None:
        """Note planes that go to a neighbour, from where they lie."""
        self._sends[position > self._here] = planes

    def receive(self, planes: Tensor, position: int) -> Tensor:
        """Note where planes of a neighbour arrive, and return it."""
        self._receives[position > self._here] = planes
        return planes

    def start(self) -> Callable[[], object]:
        """Start; return the function that waits."""
        return self._box.start(self._sends, self._receives)

    def end(self) -> None:
        """Nothing is lent."""
