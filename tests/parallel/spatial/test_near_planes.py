"""Planes by mailbox are those by message: to whoever wants them, in whatever layout, and back."""

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from in_group import in_group
from torch import Tensor

from volseg.device.peer.planes import EAGER_LIMIT, PlaneMailbox
from volseg.parallel.spatial.plan.shards import Fetch, Span, Transfer, spans
from volseg.parallel.spatial.transport.near_planes import is_near
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards


class Relay:
    """What a `PlaneMailbox` does, by messages: both sides must agree on what travels."""

    def __init__(self) -> None:
        self.rank, self.calls = dist.get_rank(), 0
        self.neighbours = [
            rank if 0 <= rank < dist.get_world_size() else None for rank in (self.rank - 1, self.rank + 1)
        ]

    def start(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Callable[[], None]:
        self.calls += 1
        pairs = list(zip(self.neighbours, sends, receives, strict=True))
        assert not any(there is None and (sent is not None or came is not None) for there, sent, came in pairs)
        sizes = [torch.tensor([0 if planes is None else planes.numel()]) for planes in sends]
        coming = [torch.zeros(1, dtype=torch.int64) for _ in receives]
        arrived = [None if planes is None else torch.empty(planes.shape, dtype=planes.dtype) for planes in receives]
        work = []
        for (there, sent, _), size, told, place in zip(pairs, sizes, coming, arrived, strict=True):
            if there is not None:
                work += [dist.isend(size, there), dist.irecv(told, there)]
                work += [] if sent is None else [dist.isend(sent.contiguous(), there)]
                work += [] if place is None else [dist.irecv(place, there)]

        def wait() -> None:
            for one in work:
                cast(dist.Work, one).wait()
            for planes, came, told in zip(receives, arrived, coming, strict=True):
                assert int(told) == (0 if planes is None else planes.numel())
                if planes is not None and came is not None:
                    planes.copy_(came)

        return wait


LAYOUTS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda slab: slab,
    lambda slab: slab.contiguous(memory_format=torch.channels_last_3d),
    lambda slab: slab.movedim(2, 0).contiguous().movedim(0, 2),
)


def draw_wanted(drawn: random.Random, size: int, shards: int, unit: int) -> list[Span]:
    """Return a span for each shard: into its neighbours' slabs at most, or all moved on around the volume's ends."""
    owned = spans(size, shards, unit)
    if drawn.random() < 0.3:
        shift = drawn.randint(-3, 3)
        return [(start + shift, stop + shift) for start, stop in owned]
    wanted = []
    for shard in range(shards):
        least, most = owned[max(0, shard - 1)][0], owned[min(shards - 1, shard + 1)][1]
        start = drawn.randint(least, most)
        wanted.append((start, drawn.randint(start, most)))
    return wanted


def outcomes(seed: int) -> dict[str, Any]:
    """Exchange random planes by message and by mailbox, and count what differs."""
    drawn, group = random.Random(seed), cast(dist.ProcessGroup, dist.group.WORLD)
    shards, rank = dist.get_world_size(), dist.get_rank()
    differ, calls, near = [], 0, 0
    for number in range(40):
        size, unit = drawn.randint(shards, 14), drawn.choice([1, 1, 2])
        size *= unit
        wanted, layout = draw_wanted(drawn, size, shards, unit), drawn.choice(LAYOUTS)
        widths = drawn.choice([(), (), (1, 0, 0, 2), (0, 0, 0, 0, 2, 1)])
        whole = torch.randn(1, 4, size, 3, 2, generator=torch.Generator().manual_seed(number))
        own = spans(size, shards, unit)[rank]
        plan, results = Fetch(0, 2, size, wanted, unit), []
        for box in (None, Relay()):
            communicator = ProcessGroupShards(group, (shards,), torch.device("cpu"))
            communicator.plane_mailbox = cast(PlaneMailbox, box)
            slab = layout(whole[:, :, own[0] : own[1]].contiguous())
            fetched = communicator.exchange(slab, plan, widths, 7.0)
            inside = layout(torch.randn(1, 4, wanted[rank][1] - wanted[rank][0], 3, 2))
            inside.copy_(whole[:, :, [plane % size for plane in range(*wanted[rank])]].square())
            results.append([fetched, communicator.give_back(inside, plan)])
            calls += 0 if box is None else box.calls
        near += 2 * is_near(plan.moves, whole, 2)
        for one, other in zip(*results, strict=True):
            if not torch.equal(one, other) or one.stride() != other.stride():
                differ.append((number, one.shape, other.shape))
    return {"differ": differ, "calls": calls, "near": near}


def test_planes_by_mailbox_are_those_by_message() -> None:
    for shards in (2, 3):
        for found in in_group(shards, outcomes, shards):
            assert not found["differ"]
            assert found["calls"] == found["near"] > 30


def test_which_planes_travel_by_mailbox() -> None:
    slab = torch.zeros(1, 2, 4, 8, 8)
    assert is_near([Transfer(0, 0, 0, 4, 0), Transfer(1, 0, 4, 5, 0)], slab, 2)
    assert not is_near([Transfer(0, 0, 0, 4, 0)], slab, 2)  # nothing moves
    assert not is_near([Transfer(0, 2, 0, 4, 0)], slab, 2)  # past a neighbour
    assert not is_near([Transfer(1, 0, 4, 5, 0), Transfer(1, 0, 6, 7, 3)], slab, 2)  # two pieces of one
    assert not is_near([Transfer(1, 0, 4, 5, 0)], slab.long(), 2)  # what is lost would be a number
    assert not is_near([Transfer(1, 0, 4, 5, 0)], torch.zeros(1, 1, 4, 1, 1, dtype=torch.bfloat16), 2)  # half a word
    most = EAGER_LIMIT // 4
    assert is_near([Transfer(1, 0, 4, 5, 0)], torch.zeros(1, 1, 4, 1, 1).expand(1, 1, 4, 1, most), 2)
    assert not is_near([Transfer(1, 0, 4, 5, 0)], torch.zeros(1, 1, 4, 1, 1).expand(1, 1, 4, 1, most + 1), 2)
