"""Planes written into neighbours' memory arrive at every call, and networks compute the same as through NCCL.

The kernels run on a GPU, or anywhere by Triton's interpreter.
``python test_peer_planes.py WHAT FOLDER`` in each process of a group writes what it found.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kernels import DEVICE, INTERPRETED, with_kernels
from torch import Tensor, nn

from volseg.device.peer.planes import LIMIT, PlaneMailbox, small_enough
from volseg.errors import ParallelError
from volseg.parallel import ModelParallel, launch
from volseg.parallel.processes.group import start_group
from volseg.parallel.spatial.transport.halo import Halo, copy_halo, put_halo_back, return_gradients, start_filling
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.transport.pieces import allocate_with_room, extend, own_planes
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards


def test_which_way_depends_on_what_all_shards_know() -> None:
    assert small_enough(1, LIMIT // 2, torch.float16)
    assert not small_enough(1, LIMIT // 2 + 2, torch.float16)
    assert not small_enough(1, LIMIT // 2, torch.float32)
    assert small_enough(1, LIMIT // 8, torch.float64)
    assert not small_enough(2, LIMIT // 4, torch.float32)
    assert Halo(LocalDevices(["cpu"] * 2), ((1, 0), (0, 2))).width == 2  # another shard's counts


def test_half_words_go_another_way() -> None:
    assert not small_enough(1, 75, torch.float16)
    assert not small_enough(1, 75, torch.bfloat16)
    assert small_enough(1, 75, torch.float32)
    assert small_enough(1, 74, torch.float16)
    assert not small_enough(2, 75, torch.float16)  # whole words there, but not for every halo
    assert not small_enough(1, 0, torch.float32)
    assert not small_enough(1, 76, torch.int64)


class Neighbours:
    """Shards of one device with a stream each, as ``halo`` sees them; sends of all come before any wait."""

    def __init__(self, shards: int) -> None:
        self.memory = torch.zeros(shards, PlaneMailbox.size(), dtype=torch.uint8, device=DEVICE)
        boxes = [box.data_ptr() for box in self.memory]
        self.sides = [PlaneMailbox(boxes, rank, self.memory.device, patience=2**22) for rank in range(shards)]
        self.streams = [nullcontext() if INTERPRETED else torch.cuda.stream(torch.cuda.Stream()) for _ in self.sides]
        self.synchronize()

    def synchronize(self) -> None:
        if not INTERPRETED:
            torch.cuda.synchronize()

    def exchange(self, sends: Sequence[Sequence[Tensor | None]], receives: Sequence[Sequence[Tensor | None]]) -> None:
        self.synchronize()
        waits = []
        for side, stream, *both in zip(self.sides, self.streams, sends, receives, strict=True):
            with stream:
                waits.append(side.start(*both))
        for wait, stream in zip(waits, self.streams, strict=True):
            with stream:
                wait()
        self.synchronize()


def slabs_in_room(shape: Sequence[int], planes: Sequence[int], dtype: torch.dtype, last: bool) -> list[Tensor]:
    """Return a slab of random values per shard, in buffers full of sevens."""
    batch, channels, *extent = shape
    slabs = []
    for count in planes:
        slab = torch.randn(batch, channels, count + 4, *extent, device=DEVICE).to(dtype)
        slab = slab.contiguous(memory_format=torch.channels_last_3d) if last else slab
        slab[:, :, :2], slab[:, :, -2:] = 7, 7
        slabs.append(slab.narrow(2, 2, count))
    return slabs


def halos(slab: Tensor, before: int, behind: int) -> Tensor:
    """Return the slab and the planes around it."""
    shape = [*slab.shape[:2], before + slab.shape[2] + behind, *slab.shape[3:]]
    return slab.as_strided(shape, slab.stride(), slab.storage_offset() - before * slab.stride(2))


@with_kernels
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("last", [True, False])
def test_halos_hold_what_neighbours_have_call_after_call(shards: int, last: bool) -> None:
    all_shards = Neighbours(shards)
    order = (0, 2, 3, 4, 1) if last else (0, 1, 2, 3, 4)
    cases = [
        ((1, 4, 3, 5), torch.float32, (1, 1)),
        ((1, 16, 13, 11), torch.float16, (2, 2)),  # more than one block
        ((2, 6, 3, 4), torch.bfloat16, (1, 0)),
        ((2, 3, 5, 3), torch.float64, (0, 1)),
        ((1, 1, 2, 2), torch.float32, (2, 1)),
        ((3, 2, 5, 7), torch.float16, (1, 2)),  # runs of an odd number of values: packed
        ((1, 2, 1, 1), torch.float64, (1, 1)),
    ]
    for call, (shape, dtype, (before, behind)) in enumerate(cases):
        slabs = slabs_in_room(shape, [3 + rank for rank in range(shards)], dtype, last)
        whole = torch.cat([torch.zeros_like(slabs[0])[:, :, :2], *slabs, torch.zeros_like(slabs[0])[:, :, :2]], 2)
        sends, receives = [], []
        for slab in slabs:
            count = slab.shape[2]
            around = halos(slab, before, behind)
            sends.append(
                (slab.narrow(2, 0, behind).permute(order), slab.narrow(2, count - before, before).permute(order))
            )
            front, back = around.narrow(2, 0, before), around.narrow(2, before + count, behind)
            receives.append((front.permute(order), back.permute(order)))
        all_shards.exchange(sends, receives)
        start = 2
        for slab in slabs:
            expected = whole.narrow(2, start - before, before + slab.shape[2] + behind)
            assert torch.equal(halos(slab, before, behind), expected), call
            outside = [halos(slab, 2, 2)[:, :, : 2 - before], halos(slab, 2, 2)[:, :, 2 + slab.shape[2] + behind :]]
            assert all((planes == 7).all() for planes in outside), call
            start += slab.shape[2]


@with_kernels
def test_planes_that_begin_within_a_word_are_packed() -> None:
    both = Neighbours(2)
    values = torch.randn(2, 42, device=DEVICE).to(torch.float16)
    got = torch.full((2, 42), 7, device=DEVICE, dtype=torch.float16)
    sends = [(None, values[0, 1:41]), (values[1, 1:41], None)]
    both.exchange(sends, [(None, got[0, 1:41]), (got[1, 1:41], None)])
    assert torch.equal(got[:, 1:41], values.flip(0)[:, 1:41])
    assert (got[:, [0, 41]] == 7).all()


@with_kernels
def test_the_largest_halo_arrives() -> None:
    both = Neighbours(2)
    values = torch.randn(2, LIMIT // 4, device=DEVICE)
    for _ in range(1 if INTERPRETED else 3):
        got = torch.zeros_like(values)
        both.exchange([(None, values[0]), (values[1], None)], [(None, got[0]), (got[1], None)])
        assert torch.equal(got, values.flip(0))
        values = values + 1


@with_kernels
def test_an_open_exchange_is_completed_before_the_next_is_sent() -> None:
    both = Neighbours(2)
    values = [torch.randn(2, 8, device=DEVICE) for _ in range(4)]
    got = [torch.zeros(2, 8, device=DEVICE) for _ in range(4)]
    waits = []
    for sent, arriving in zip(values, got, strict=True):
        both.synchronize()
        # Both have sent before either receives the exchange before: one device's shards take turns.
        for side, stream in zip(both.sides, both.streams, strict=True):
            with stream:
                side._complete(recording=False)
        for rank, (side, stream) in enumerate(zip(both.sides, both.streams, strict=True)):
            pair = [None, None]
            pair[1 - rank] = sent[rank]
            target = [None, None]
            target[1 - rank] = arriving[rank]
            with stream:
                waits.append(side.start(pair, target))
    both.synchronize()  # they wait on one stream, and count on from what the shards' streams have counted
    for wait in waits * 2:  # late, and twice
        wait()
    both.synchronize()
    for sent, arriving in zip(values, got, strict=True):
        assert torch.equal(arriving, sent.flip(0))


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_who_does_not_come_leaves_nan(dtype: torch.dtype) -> None:
    memory = torch.zeros(2, PlaneMailbox.size(), dtype=torch.uint8, device=DEVICE)
    alone = PlaneMailbox([box.data_ptr() for box in memory], 0, memory.device, patience=20)
    border, awaited = torch.ones(6, device=DEVICE, dtype=dtype), torch.ones(6, device=DEVICE, dtype=dtype)
    alone.start((None, awaited), (border, awaited))()
    assert (border == 0).all()
    assert awaited.isnan().all()


@pytest.mark.gpu
def test_recordings_that_fail_or_begin_half_way() -> None:
    memory = torch.zeros(PlaneMailbox.size(), dtype=torch.uint8, device="cuda")
    alone = PlaneMailbox([memory.data_ptr()], 0, memory.device)
    borders = [torch.ones(6, device="cuda") for _ in range(4)]
    alone.start((None, None), (borders[0], None))()  # compiled
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        forgotten = alone.start((None, None), (borders[1], None))
    wait = alone.start((None, None), (borders[2], None))
    forgotten()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        borders[3].zero_()
        with pytest.raises(ParallelError, match="record whole steps"):
            alone.start((None, None), (borders[3], None))
    wait()
    assert [int(border.sum()) for border in borders[:3]] == [0, 6, 0]
    assert alone.calls.tolist() == [2, 0]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        alone.start((None, None), (borders[1], None))
    alone.settle()  # nothing of it is left in the next recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alone.start((None, None), (borders[1], None))()
    for replays in (1, 2):
        graph.replay()
        assert alone.calls.tolist() == [2 + replays, 0]
    assert int(borders[1].sum()) == 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("what", ["exchange", "compare"])
def test_processes(what: str, tmp_path: Path) -> None:
    """Planes arrive, eagerly and from graphs; networks compute the same as through NCCL; planes are given back."""
    launch([__file__, what, str(tmp_path)], processes=torch.cuda.device_count())
    for rank in range(torch.cuda.device_count()):
        assert (tmp_path / str(rank)).read_text(encoding="utf-8") == "equal"


def _group() -> tuple[ProcessGroupShards, int, int]:
    start_group()
    rank, shards = dist.get_rank(), dist.get_world_size()
    group = ProcessGroupShards(dist.group.WORLD, [shards], torch.device("cuda", rank))
    assert group.plane_mailbox is not None
    return group, rank, shards


class Rounds:
    """Halos of slabs that hold one value per process: filled, or their gradient given back."""

    def __init__(self, group: ProcessGroupShards) -> None:
        each = [(1, 1), (1, 0), (0, 1), (2, 1), (1, 1)]
        self.halos = [Halo(group, (pair,) * group.num_shards, channels_last=True) for pair in each]
        self.base = torch.zeros((), device=group.home)
        # The last travels on a stream of its own while a graph is recorded.
        sides = [(24, 20)] * 4 + [(96, 100)]
        likes = [torch.empty(1, 16, 4, *side, device=group.home, dtype=torch.float16) for side in sides]
        self.likes = [like.contiguous(memory_format=torch.channels_last_3d) for like in likes]

    def run(self) -> list[Tensor]:
        results = []
        for number, (halo, like) in enumerate(zip(self.halos, self.likes, strict=True)):
            slab = allocate_with_room(like, 2)
            slab.copy_((self.base + number).expand_as(slab))
            buffer = extend(slab, 2, halo.own)
            start_filling([buffer], [halo])()
            kept = copy_halo(buffer, halo.own)
            restored = torch.full_like(buffer, 99)
            own_planes(restored, halo.own).copy_(own_planes(buffer, halo.own))
            put_halo_back(restored, halo.own, kept)
            results.append(restored)
            results += return_gradients([buffer.clone()], [halo])()
        return results

    def check(self, results: Sequence[Tensor], rank: int, shards: int, repeat: int) -> None:
        for number, halo in enumerate(self.halos):
            before, behind = halo.own
            values = [float(10 * other + repeat + number) for other in range(shards)]
            front, back = values[rank - 1] if rank > 0 else 0.0, values[rank + 1] if rank + 1 < shards else 0.0
            filled, returned = results[2 * number : 2 * number + 2]
            assert (own_planes(filled, halo.own) == values[rank]).all()
            assert (filled[:, :, :before] == front).all()
            assert (filled[:, :, filled.shape[2] - behind :] == back).all()
            expected = torch.full((4,), values[rank])
            if rank > 0:  # the shard before has this one's first planes behind its own
                expected[:behind] += values[rank]
            if rank + 1 < shards:
                expected[4 - before :] += values[rank]
            assert torch.equal(returned[0, 0, :, 0, 0].cpu().float(), expected)
            assert returned.equal(returned[:, :1, :, :1, :1].expand_as(returned))


def exchange(folder: Path) -> None:
    group, rank, shards = _group()
    rounds = Rounds(group)
    for repeat in range(20):
        rounds.base.fill_(10.0 * rank + repeat)
        if rank == repeat % shards:  # one is late
            torch.cuda._sleep(10_000_000)
        rounds.check(rounds.run(), rank, shards, repeat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = rounds.run()
    for repeat in range(20):
        rounds.base.fill_(10.0 * rank + repeat)
        if rank == repeat % shards:
            torch.cuda._sleep(10_000_000)
        graph.replay()
        rounds.check(recorded, rank, shards, repeat)
    (folder / str(rank)).write_text("equal", encoding="utf-8")
    del graph
    dist.destroy_process_group()


def stack() -> nn.Module:
    """Return a DynUNet's operations with halos: strided and transposed convolutions, norms, a join."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def block(*channels: int, stride: int = 1) -> nn.Module:
                convolution = nn.Conv3d(*channels, 3, stride, 1)
                return nn.Sequential(convolution, nn.InstanceNorm3d(channels[1], affine=True), nn.LeakyReLU(0.01))

            self.stem = nn.Sequential(block(1, 16), block(16, 16))
            self.down = nn.Sequential(block(16, 32, stride=2), block(32, 32))
            self.up = nn.ConvTranspose3d(32, 16, 2, 2)
            self.head = nn.Sequential(block(32, 16), nn.Conv3d(16, 3, 1))

        def forward(self, image: Tensor) -> Tensor:
            fine = self.stem(image)
            return self.head(torch.cat([self.up(self.down(fine)), fine], 1))

    return Net()


def compare(folder: Path) -> None:
    group, rank, shards = _group()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    for dtype in (torch.float32, torch.float64):
        for batch in (1, 2):
            torch.manual_seed(0)
            model = ModelParallel(stack().to(group.home, dtype), strategy="spatial")
            image = torch.randn(batch, 1, 16 * shards, 24, 20, device=group.home, dtype=dtype)
            own = model.strategy.communicator
            box = own.plane_mailbox
            assert box is not None
            results = []
            for found in (None, box):
                own.plane_mailbox = found
                model.zero_grad()
                before = int(box.calls[0])
                output = model(image)
                output.square().mean().backward()
                results.append([output.full_tensor().detach(), *[p.grad.clone() for p in model.parameters()]])
                assert (int(box.calls[0]) > before) == (found is not None)
            for through_nccl, through_memory in zip(*results, strict=True):
                assert torch.equal(through_nccl, through_memory)
    (folder / str(rank)).write_text("equal", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    {"exchange": exchange, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
