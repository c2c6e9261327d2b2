"""The halo of a slab: the neighbours' planes around it, exchanged while other work goes on.

A convolution's halo is received around its slab (see ``room``). The gradient of the halo goes the other way, and is
added to the neighbours' own planes. Both are one exchange with the shard before and the shard behind, by mailbox where
GPUs see each other's memory and little is sent, else by messages of the process group.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.layout import DIM
from volseg.device.peer.planes import EAGER_LIMIT, LIMIT, small_enough
from volseg.parallel.spatial.transport import kept_halo
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.spatial.transport.room import extend, own_planes

__all__ = ["Halo", "Wait", "return_gradient", "start_filling", "write_outer_first"]

Wait = Callable[[], "list[Tensor] | None"]
"""Waits for planes; returns a copy of them where one was asked for and made."""


class Halo:
    """Planes around the slab of each shard along the cut, and who has them: the direct neighbours.

    Parameters
    ----------
    communicator
        The processes that share the volume.
    planes
        Planes before and behind the slab of each shard.
    channels_last
        Whether planes travel with channels last.

    Attributes
    ----------
    own
        Planes before and behind this process's slab.
    neighbours
        Numbers of the shards before and behind; None at the volume's border.
    owed
        How many of the slab's first and of its last planes the neighbours read.
    width
        Planes on the widest side of any shard: what all decide by, where all must decide alike.
    """

    def __init__(
        self, communicator: ProcessGroupShards, planes: tuple[tuple[int, int], ...], channels_last: bool = False
    ) -> None:
        self.communicator, self.planes, self.channels_last = communicator, planes, channels_last
        rank, last = communicator.rank, len(planes) - 1
        self.own = planes[rank]
        self.neighbours = rank - 1 if rank > 0 else None, rank + 1 if rank < last else None
        self.owed = planes[rank - 1][1] if rank > 0 else 0, planes[rank + 1][0] if rank < last else 0
        self.width = max(map(max, planes))

    def view_around(self, buffer: Tensor) -> list[Tensor]:
        """Return the planes before and behind the slab in a buffer; none at the volume's border, or some of padding."""
        before, behind = self.own
        return [buffer.narrow(DIM, 0, before), buffer.narrow(DIM, buffer.shape[DIM] - behind, behind)]

    def view_owed(self, slab: Tensor) -> list[Tensor | None]:
        """Return the planes of the slab that the shards before and behind read; None where there is no such shard."""
        front, back = self.owed
        views = slab.narrow(DIM, 0, front), slab.narrow(DIM, slab.shape[DIM] - back, back)
        return [None if number is None else view for view, number in zip(views, self.neighbours, strict=True)]


def start_filling(buffer: Tensor, halo: Halo, keep: bool = False) -> Wait:
    """Start to fetch the halo from the neighbours; the returned function waits for it.

    The slab's outermost planes must have been written. With ``keep``, the function returns a copy of the planes as
    ``kept_halo`` has them, where that costs nothing more, else None.
    """
    sends, receives = halo.view_owed(own_planes(buffer, halo.own)), halo.view_around(buffer)
    return _start_exchange(halo, sends, receives, buffer if keep else None)


def write_outer_first(
    out: Tensor,
    room: int,
    halo: Halo | None,
    write: Callable[[int, int], None],
    write_ends: Callable[[int, int], None] | None = None,
) -> Wait | None:
    """Write a slab; planes that the neighbours wait for come first, and are sent.

    Parameters
    ----------
    out
        The slab to write.
    room
        Planes of room around it.
    halo
        What the neighbours need; None where there are none.
    write
        ``write(first, count)`` writes so many planes from the first on.
    write_ends
        ``write_ends(front, back)`` writes so many of the first and of the last planes, where one pass can.
    """
    planes = out.shape[DIM]
    if halo is None:
        write(0, planes)
        return None
    front, back = halo.owed
    if front + back >= planes:
        write(0, planes)
        return start_filling(extend(out, room, halo.own), halo, keep=True)
    if front and back and write_ends is not None:
        write_ends(front, back)
    else:
        if front:
            write(0, front)
        if back:
            write(planes - back, back)
    wait = start_filling(extend(out, room, halo.own), halo, keep=True)
    write(front, planes - front - back)
    return wait


def return_gradient(gradient: Tensor, halo: Halo) -> Callable[[], Tensor]:
    """Start to send the halo's gradient back; the returned function adds what comes to the slab's own."""
    slab = own_planes(gradient, halo.own)
    around = zip(halo.view_around(gradient), halo.neighbours, strict=True)
    sends = [None if number is None else planes for planes, number in around]
    targets = halo.view_owed(slab)
    receives = [None if target is None else torch.empty_like(target) for target in targets]
    wait = _start_exchange(halo, sends, receives)

    def finish() -> Tensor:
        wait()
        for target, arrived in zip(targets, receives, strict=True):
            if target is not None and arrived is not None:
                target.add_(arrived)
        return slab

    return finish


def _start_exchange(
    halo: Halo, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], keep: Tensor | None = None
) -> Wait:
    """Start to send planes to the shards before and behind, and to receive theirs.

    None is sent where there is no such shard, and zeros are received. Which way planes travel follows from sizes that
    all shards have in common, never from how a slab lies in memory. ``keep`` is the buffer whose halo is received, if a
    copy of it is wanted.
    """
    # Both sides must agree on the order of voxels, whatever the layout of a slab happens to be.
    order = (0, 2, 3, 4, 1) if halo.channels_last else (0, 1, 2, 3, 4)
    ordered_sends = [None if planes is None else planes.permute(order) for planes in sends]
    ordered_receives = [None if planes is None else planes.permute(order) for planes in receives]
    box = halo.communicator.plane_mailbox
    if box is not None and _fits_mailbox(halo, [*sends, *receives]):
        if keep is None:
            return box.start(ordered_sends, ordered_receives)
        kept, parts = kept_halo.allocate(keep, halo.own, order)
        wait = box.start(ordered_sends, ordered_receives, parts)

        def wait_and_keep() -> list[Tensor]:
            wait()
            return kept

        return wait_and_keep
    return _start_messages(halo, ordered_sends, ordered_receives)


def _fits_mailbox(halo: Halo, some: Sequence[Tensor | None]) -> bool:
    planes = next(planes for planes in some if planes is not None)
    values = planes.shape[:DIM].numel() * planes.shape[DIM + 1 :].numel()
    recording = halo.communicator.home.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return small_enough(halo.width, values, planes.dtype, LIMIT if recording else EAGER_LIMIT)


def _start_messages(
    halo: Halo, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]
) -> Callable[[], None]:
    """Exchange planes through the process group; those that lie in memory as they travel are not copied.

    While a CUDA graph is recorded all are copied: NCCL marks what it moves as used on its stream, and a block so
    marked is not used again before the recording ends. That should not happen to whole activations.
    """
    group = halo.communicator.group
    staged = halo.communicator.home.type == "cuda" and torch.cuda.is_current_stream_capturing()
    operations, copies, kept = [], [], []
    for planes, number in zip(sends, halo.neighbours, strict=True):
        if planes is not None and number is not None and planes.numel():
            packed = planes.contiguous()
            kept.append(packed.clone() if staged and packed.data_ptr() == planes.data_ptr() else packed)
            operations.append(dist.P2POp(dist.isend, kept[-1], dist.get_global_rank(group, number), group))
    for planes, number in zip(receives, halo.neighbours, strict=True):
        if planes is None or not planes.numel():
            continue
        if number is None:  # the volume's border
            planes.zero_()
            continue
        direct = planes.is_contiguous() and not staged
        arriving = planes if direct else torch.empty_like(planes, memory_format=torch.contiguous_format)
        if arriving is not planes:
            copies.append((planes, arriving))
        operations.append(dist.P2POp(dist.irecv, arriving, dist.get_global_rank(group, number), group))
    work = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        for request in work:
            request.wait()
        for planes, arrived in copies:
            planes.copy_(arrived)
        kept.clear()

    return wait
