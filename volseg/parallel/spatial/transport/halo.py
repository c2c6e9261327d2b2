"""Slabs in buffers with room for their halo, and the exchange that fills it while other work goes on.

A slab cut along D that a norm or a join writes gets ``room`` planes in front and behind. A convolution's halo is
received straight into them: nothing is concatenated, and in channels-last layout nothing is packed either. ::

    buffer   | room |        slab        | room |
                 ^-- from the shard before    ^-- from the shard behind; zeros at the volume's border
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from volseg.device.dims import DIM
from volseg.device.peer.planes import EAGER_LIMIT, LIMIT, small_enough
from volseg.parallel.spatial.plan.shards import spans
from volseg.parallel.spatial.plan.windows import Window
from volseg.parallel.spatial.transport import kept_halo
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards

__all__ = [
    "Halo",
    "Wait",
    "add_returned",
    "extended",
    "fill",
    "halo_of_each",
    "inner",
    "room_of",
    "roomy",
    "write_outer_first",
]

Wait = Callable[[], "list[Tensor] | None"]
"""Waits for planes; returns a copy of them where one was asked for and made."""

_rooms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Planes of room around the slabs that ``roomy`` made, for as long as they live: autograd hands on a tensor alone."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Planes before and behind the slab of each shard along the cut, and who has them: the direct neighbours."""

    shards: ProcessGroupShards
    planes: tuple[tuple[int, int], ...]
    channels_last: bool = False

    @property
    def own(self) -> tuple[int, int]:
        """Planes before and behind this process's slab."""
        return self.planes[self.shards.rank]

    @property
    def width(self) -> int:
        """Planes on the widest side of any shard: what all decide by, where all must decide alike."""
        return max(map(max, self.planes))


@lru_cache(maxsize=1024)
def halo_of_each(size: int, shards: int, window: Window, outputs: int) -> tuple[tuple[int, int], ...] | None:
    """Return the planes that each shard needs before and behind its slab, or None where it is not that simple.

    It is not where a shard needs less than its slab, or planes from further than the direct neighbour.
    """
    result = []
    owned = spans(size, shards)
    for index, (own, output) in enumerate(zip(owned, spans(outputs, shards), strict=True)):
        if output[0] == output[1] or window.first(*output) != output[0]:
            return None
        need = window.need(*output)
        before, behind = own[0] - need[0], need[1] - own[1]
        if before < 0 or behind < 0:
            return None
        if index > 0 and before > owned[index - 1][1] - owned[index - 1][0]:
            return None
        if index < shards - 1 and behind > owned[index + 1][1] - owned[index + 1][0]:
            return None
        result.append((before, behind))
    return tuple(result)


def _alias(tensor: Tensor, offset: int, planes: int) -> Tensor:
    """Return planes around ``tensor`` in its own memory: not a view for autograd, which must not see the room."""
    shape = list(tensor.shape)
    shape[DIM] = planes
    start = tensor.storage_offset() + offset * tensor.stride(DIM)
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, shape, tensor.stride())


def _buffer(like: Tensor, planes: int, channels: int | None = None, device: torch.device | None = None) -> Tensor:
    shape = list(like.shape)
    shape[DIM] = planes
    shape[1] = shape[1] if channels is None else channels
    last = like.ndim == 5 and like.stride(1) == 1 and like.shape[1] > 1
    layout = torch.channels_last_3d if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=device or like.device, memory_format=layout)


def roomy(like: Tensor, room: int, channels: int | None = None, device: torch.device | None = None) -> Tensor:
    """Return an uninitialised slab like ``like`` with ``room`` planes around it."""
    planes = like.shape[DIM]
    slab = _alias(_buffer(like, planes + 2 * room, channels, device), room, planes)
    _rooms[slab] = room
    return slab


def room_of(slab: Tensor) -> int:
    """Return the planes of room around a slab: none unless ``roomy`` made it, and no view of it has any."""
    return int(_rooms.get(slab, 0))


def extended(slab: Tensor, room: int, own: tuple[int, int]) -> Tensor:
    """Return the slab and the planes around it: its own memory where there is room, else a copy."""
    before, behind = own
    planes = before + slab.shape[DIM] + behind
    if room >= max(own):
        return _alias(slab, -before, planes)
    buffer = _buffer(slab, planes)
    inner(buffer, own).copy_(slab)
    return buffer


def inner(buffer: Tensor, own: tuple[int, int]) -> Tensor:
    """Return the slab's own planes."""
    return buffer.narrow(DIM, own[0], buffer.shape[DIM] - sum(own))


def fill(buffer: Tensor, halo: Halo, keep: bool = False) -> Wait:
    """Start to fetch the halo from the neighbours; the returned function waits for it.

    The slab's outermost planes must have been written. With ``keep``, the function returns a copy of the planes as
    ``edges`` has them, where that costs nothing more, else None.
    """
    rank, last = halo.shards.rank, halo.shards.shards - 1
    before, behind = halo.own
    slab = inner(buffer, halo.own)
    front, back = buffer.narrow(DIM, 0, before), buffer.narrow(DIM, buffer.shape[DIM] - behind, behind)
    sends: list[Tensor | None] = [None, None]
    if rank > 0:
        sends[0] = slab.narrow(DIM, 0, halo.planes[rank - 1][1])
    if rank < last:
        count = halo.planes[rank + 1][0]
        sends[1] = slab.narrow(DIM, slab.shape[DIM] - count, count)
    return _exchange(halo, sends, [front, back], buffer if keep else None)


def write_outer_first(
    out: Tensor,
    room: int,
    halo: Halo | None,
    write: Callable[[int, int], None],
    write_ends: Callable[[int, int], None] | None = None,
) -> Wait | None:
    """Write a slab with ``write(first, count)``; planes that the neighbours wait for come first, and are sent.

    ``write_ends(front, back)`` writes so many of the first and of the last planes, where one pass can.
    """
    planes = out.shape[DIM]
    if halo is None:
        write(0, planes)
        return None
    rank, each = halo.shards.rank, halo.planes
    front = each[rank - 1][1] if rank > 0 else 0
    back = each[rank + 1][0] if rank + 1 < len(each) else 0
    if front + back >= planes:
        write(0, planes)
        return fill(extended(out, room, halo.own), halo, keep=True)
    if front and back and write_ends is not None:
        write_ends(front, back)
    else:
        if front:
            write(0, front)
        if back:
            write(planes - back, back)
    wait = fill(extended(out, room, halo.own), halo, keep=True)
    write(front, planes - front - back)
    return wait


def add_returned(gradient: Tensor, halo: Halo) -> Callable[[], Tensor]:
    """Start to send the halo's gradient back; the returned function adds what comes to the slab's own."""
    rank, last = halo.shards.rank, halo.shards.shards - 1
    before, behind = halo.own
    slab = inner(gradient, halo.own)
    sends: list[Tensor | None] = [None, None]
    targets: list[Tensor | None] = [None, None]
    if rank > 0:
        sends[0] = gradient.narrow(DIM, 0, before)
        targets[0] = slab.narrow(DIM, 0, halo.planes[rank - 1][1])
    if rank < last:
        sends[1] = gradient.narrow(DIM, gradient.shape[DIM] - behind, behind)
        count = halo.planes[rank + 1][0]
        targets[1] = slab.narrow(DIM, slab.shape[DIM] - count, count)
    receives = [None if target is None else torch.empty_like(target) for target in targets]
    wait = _exchange(halo, sends, receives)

    def finish() -> Tensor:
        wait()
        for target, arrived in zip(targets, receives, strict=True):
            if target is not None and arrived is not None:
                target.add_(arrived)
        return slab

    return finish


def _exchange(
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
    box = halo.shards.plane_mailbox
    if box is not None and _by_mailbox(halo, [*sends, *receives]):
        if keep is None:
            return box.start(ordered_sends, ordered_receives)
        kept, parts = kept_halo.uninitialized(keep, halo.own, order)
        wait = box.start(ordered_sends, ordered_receives, parts)

        def wait_and_keep() -> list[Tensor]:
            wait()
            return kept

        return wait_and_keep
    return _by_messages(halo, ordered_sends, ordered_receives)


def _by_mailbox(halo: Halo, some: Sequence[Tensor | None]) -> bool:
    planes = next(planes for planes in some if planes is not None)
    values = planes.shape[:DIM].numel() * planes.shape[DIM + 1 :].numel()
    recording = halo.shards.home.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return small_enough(halo.width, values, planes.dtype, LIMIT if recording else EAGER_LIMIT)


def _by_messages(halo: Halo, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Callable[[], None]:
    """Exchange planes through the process group; those that lie in memory as they travel are not copied.

    While a CUDA graph is captured all are copied: NCCL marks what it moves as used on its stream, and a block so
    marked is not used again before the capture ends. That should not happen to whole activations.
    """
    group, rank, last = halo.shards.group, halo.shards.rank, halo.shards.shards - 1
    staged = halo.shards.home.type == "cuda" and torch.cuda.is_current_stream_capturing()
    numbers = rank - 1 if rank > 0 else None, rank + 1 if rank < last else None
    operations, copies, kept = [], [], []
    for planes, number in zip(sends, numbers, strict=True):
        if planes is not None and number is not None and planes.numel():
            packed = planes.contiguous()
            kept.append(packed.clone() if staged and packed.data_ptr() == planes.data_ptr() else packed)
            operations.append(dist.P2POp(dist.isend, kept[-1], dist.get_global_rank(group, number), group))
    for planes, number in zip(receives, numbers, strict=True):
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
