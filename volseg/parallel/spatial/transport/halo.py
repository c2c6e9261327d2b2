"""Exchange the halo of a slab, the neighbours' planes around it, during other work.

A convolution's halo is received around its slab (see ``pieces``). In backward, ``convolution.slab`` decides: at stride
1 the halo of the output's gradient is received, otherwise the gradient of the halo travels back and is added to the
neighbours' own planes. Each is one exchange with the shards before and behind: by mailbox for small planes if
GPUs see each other's memory, otherwise by messages of the process group. Between slabs of one process planes are
copied. In each case the planes and their places are the same, and they are added in one order.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from volseg.device.gpus import is_gpu, is_recording
from volseg.device.layout import DIM
from volseg.device.peer.planes import EAGER_LIMIT, LIMIT, small_enough
from volseg.parallel.spatial.transport.communicator import Communicator
from volseg.parallel.spatial.transport.pieces import extend, own_planes
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards

Wait = Callable[[], None]
"""Waits for planes."""

Planes = tuple[tuple[int, int], ...]
"""Numbers of planes before and behind each shard's slab."""


class Halo:
    """Planes around one shard's slab along the cut, and their owners: the direct neighbours.

    Parameters
    ----------
    communicator
        The shards.
    planes
        Planes before and behind the slab of each shard.
    channels_last
        Whether planes travel with channels last.
    index
        The shard, one of this process; by default the first of them.

    Attributes
    ----------
    own
        Planes before and behind the slab.
    neighbours
        Numbers of the shards before and behind; None at the volume's border.
    owed
        Numbers of the slab's first and last planes that the neighbours read.
    width
        Planes on the widest side of any shard: the value for decisions that all shards must share.
    """

    def __init__(
        self, communicator: Communicator, planes: Planes, channels_last: bool = False, index: int | None = None
    ) -> None:
        self.communicator, self.planes, self.channels_last = communicator, planes, channels_last
        index, last = communicator.indices[0] if index is None else index, len(planes) - 1
        self.own = planes[index]
        self.neighbours = index - 1 if index > 0 else None, index + 1 if index < last else None
        self.owed = planes[index - 1][1] if index > 0 else 0, planes[index + 1][0] if index < last else 0
        self.width = max(map(max, planes))

    def view_around(self, buffer: Tensor) -> list[Tensor]:
        """Return the planes before and behind the slab in a buffer; empty or padding at the volume's border."""
        before, behind = self.own
        return [buffer.narrow(DIM, 0, before), buffer.narrow(DIM, buffer.shape[DIM] - behind, behind)]

    def view_owed(self, slab: Tensor) -> list[Tensor | None]:
        """Return the planes of the slab that the shards before and behind read; None without such a shard."""
        front, back = self.owed
        views = slab.narrow(DIM, 0, front), slab.narrow(DIM, slab.shape[DIM] - back, back)
        return [None if number is None else view for view, number in zip(views, self.neighbours, strict=True)]


def plan_halos(communicator: Communicator, planes: Planes, channels_last: bool = False) -> tuple[Halo, ...]:
    """Return the halo of each slab of this process; empty if no shard needs one. Arguments as in ``Halo``."""
    if not any(map(any, planes)):
        return ()
    return tuple(Halo(communicator, planes, channels_last, index) for index in communicator.indices)


def compute_halo_room(room: int, halos: Sequence[Halo]) -> int:
    """Return the planes of room to leave around slabs: more than usual if a wider halo is known to follow.

    Parameters
    ----------
    room
        Room without halos; 0 if slabs may have none.
    halos
        Halos of the convolution that reads the slabs next.
    """
    return max(room, halos[0].width) if room and halos else room


def start_filling(buffers: Sequence[Tensor], halos: Sequence[Halo]) -> Wait:
    """Start to fetch the halos of this process's slabs from the neighbours; the returned function waits for them.

    The slabs' outermost planes must have been written.
    """
    pairs = list(zip(buffers, halos, strict=True))
    slabs = [own_planes(buffer, halo.own) for buffer, halo in pairs]
    return start_receiving(slabs, halos, [halo.view_around(buffer) for buffer, halo in pairs])


def start_receiving(slabs: Sequence[Tensor], halos: Sequence[Halo], receives: Sequence["Sides"]) -> Wait:
    """Start to fetch the halos of this process's slabs into other memory; the returned function waits for them.

    Parameters
    ----------
    slabs, halos
        Slabs that the neighbours read, and their halos.
    receives
        Memory for the planes before and behind each slab; None without such a shard.
    """
    sends = [halo.view_owed(slab) for slab, halo in zip(slabs, halos, strict=True)]
    return _start_exchange(halos, sends, receives)


WritePlanes = Callable[[int, int, int], None]


def write_outer_first(outs: Sequence[Tensor], room: int, halos: Sequence[Halo], write: WritePlanes) -> Wait | None:
    """Write the slabs of this process; planes for other processes are written first, and sent.

    Parameters
    ----------
    outs
        The slabs to write.
    room
        Planes of room around each.
    halos
        Halos of the neighbours; empty if they need no planes.
    write
        ``write(number, first, count)`` writes ``count`` planes of a slab from ``first`` on.
    """

    def start() -> Wait:
        buffers = [extend(out, room, halo.own) for out, halo in zip(outs, halos, strict=True)]
        return start_filling(buffers, halos)

    planes = outs[0].shape[DIM]
    front, back = halos[0].owed if halos else (0, 0)
    if len(outs) > 1 or front + back >= planes or not halos:  # no process waits, or all planes are needed
        for number, out in enumerate(outs):
            write(number, 0, out.shape[DIM])
        return start() if halos else None
    if front:
        write(0, 0, front)
    if back:
        write(0, planes - back, back)
    wait = start()
    write(0, front, planes - front - back)
    return wait


def return_gradients(gradients: Sequence[Tensor], halos: Sequence[Halo]) -> Callable[[], list[Tensor]]:
    """Start to send the halos' gradients back; the returned function adds received gradients to the slabs' own."""
    slabs = [own_planes(gradient, halo.own) for gradient, halo in zip(gradients, halos, strict=True)]
    sends = [
        [
            None if number is None else planes
            for planes, number in zip(halo.view_around(gradient), halo.neighbours, strict=True)
        ]
        for gradient, halo in zip(gradients, halos, strict=True)
    ]
    targets = [halo.view_owed(slab) for slab, halo in zip(slabs, halos, strict=True)]
    receives = [[None if target is None else torch.empty_like(target) for target in own] for own in targets]
    wait = _start_exchange(halos, sends, receives)

    def finish() -> list[Tensor]:
        wait()
        for own, arrivals in zip(targets, receives, strict=True):
            for target, arrived in zip(own, arrivals, strict=True):
                if target is not None and arrived is not None:
                    target.add_(arrived)
        return slabs

    return finish


Sides = Sequence[Tensor | None]
"""Planes to or from the shard before and the shard behind; None without such a shard."""


def _start_exchange(halos: Sequence[Halo], sends: Sequence[Sides], receives: Sequence[Sides]) -> Wait:
    """Start to send planes of each slab to the shards before and behind, and to receive theirs.

    Without such a shard no planes are sent, and zeros are received.
    """
    if isinstance(halos[0].communicator, ProcessGroupShards):
        return _start_between_processes(halos[0], halos[0].communicator, sends[0], receives[0])
    for halo, arriving in zip(halos, receives, strict=True):
        for side, (planes, number) in enumerate(zip(arriving, halo.neighbours, strict=True)):
            if planes is None or not planes.numel():
                continue
            sent = None if number is None else sends[number][1 - side]
            if sent is None:  # the volume's border
                planes.zero_()
            else:
                planes.copy_(sent, non_blocking=True)
    return lambda: None


def _start_between_processes(halo: Halo, communicator: ProcessGroupShards, sends: Sides, receives: Sides) -> Wait:
    """Exchange planes of the one slab of this process.

    The route depends on sizes that all shards have in common, never on a slab's memory layout.
    """
    # Both sides must agree on the order of voxels, for any layout of a slab.
    order = (0, 2, 3, 4, 1) if halo.channels_last else (0, 1, 2, 3, 4)
    ordered_sends = [None if planes is None else planes.permute(order) for planes in sends]
    ordered_receives = [None if planes is None else planes.permute(order) for planes in receives]
    box = communicator.plane_mailbox
    if box is not None and _fits_mailbox(halo, [*sends, *receives]):
        return box.start(ordered_sends, ordered_receives)
    return _start_messages(halo, communicator, ordered_sends, ordered_receives)


def _fits_mailbox(halo: Halo, some: Sides) -> bool:
    planes = next(planes for planes in some if planes is not None)
    values = planes.shape[:DIM].numel() * planes.shape[DIM + 1 :].numel()
    recording = is_recording(halo.communicator.home)
    return small_enough(halo.width, values, planes.dtype, LIMIT if recording else EAGER_LIMIT)


def _start_messages(halo: Halo, communicator: ProcessGroupShards, sends: Sides, receives: Sides) -> Callable[[], None]:
    """Exchange planes through the process group; on a GPU all of them travel as copies.

    A block that NCCL has used is reused only after the host has seen NCCL's end, and in a recorded CUDA graph only
    after the graph: so no activation or gradient may be such a block.
    """
    messages, copies = communicator.begin_messages(), []
    for planes, number in zip(sends, halo.neighbours, strict=True):
        if planes is not None and number is not None and planes.numel():
            messages.send(planes, number)
    for planes, number in zip(receives, halo.neighbours, strict=True):
        if planes is None or not planes.numel():
            continue
        if number is None:  # the volume's border
            planes.zero_()
            continue
        direct = planes.is_contiguous() and not is_gpu(communicator.home)
        arriving = messages.receive(planes if direct else messages.make_room(planes.shape, planes.dtype), number)
        if arriving is not planes:
            copies.append((planes, arriving))
    arrive = messages.start()

    def wait() -> None:
        arrive()
        for planes, arrived in copies:
            planes.copy_(arrived)
        messages.end()

    return wait


def _view_planes(buffer: Tensor, own: tuple[int, int]) -> list[Tensor]:
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


def copy_halo(buffer: Tensor, own: tuple[int, int]) -> list[Tensor]:
    """Copy the halo's planes for the backward pass: a few planes instead of the whole slab.

    If both sides have equal numbers of planes, they are one tensor and one copy: ``(B, C, 2, planes, H, W)``. Otherwise
    each side with planes is one tensor, ``(B, C, planes, H, W)``.
    """
    return [planes.clone() for planes in _view_planes(buffer, own)]


def put_halo_back(buffer: Tensor, own: tuple[int, int], kept: Sequence[Tensor]) -> None:
    """Write copies of the halo's planes back to their places."""
    for planes, copy in zip(_view_planes(buffer, own), kept, strict=True):
        planes.copy_(copy)
