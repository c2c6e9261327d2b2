"""Values sent between GPUs by one kernel arrive in order, at every call.

``python test_peer_values.py FOLDER`` in each process of a group writes what it found.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.norm import choice, reference
from volseg.device.norm import exchanged as exchanges
from volseg.device.norm.activation import Activation, Term
from volseg.device.peer.values import CAPACITY, ValueMailbox
from volseg.parallel import launch
from volseg.parallel.processes.group import start_group
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards


def test_what_can_be_sent() -> None:
    assert ValueMailbox.takes(torch.zeros(2, 3))
    assert ValueMailbox.takes(torch.zeros(CAPACITY))
    assert not ValueMailbox.takes(torch.zeros(CAPACITY + 1))
    assert not ValueMailbox.takes(torch.zeros(0))
    assert not ValueMailbox.takes(torch.zeros(2, dtype=torch.float64))


class Shards:
    """Shards of one GPU, each with a mailbox and a stream; nobody waits before ``begin``."""

    def __init__(self, number: int) -> None:
        self.memory = torch.zeros(number, ValueMailbox.size(number), dtype=torch.uint8, device="cuda")
        boxes = [box.data_ptr() for box in self.memory]
        self.sides = [ValueMailbox(boxes, rank, self.memory.device, patience=0) for rank in range(number)]
        self.streams = [torch.cuda.Stream() for _ in range(number)]

    def begin(self) -> None:
        """Wait from now on: all kernels have been compiled, for loading one may wait for those that run."""
        for side in self.sides:
            side.calls.zero_()
            side.patience = 2**22
        self.memory.zero_()
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_streams_of_one_gpu_exchange(shards: int) -> None:
    group = Shards(shards)
    sides, streams, device = group.sides, group.streams, group.memory.device
    sides[0].stack(torch.zeros(1, device=device))
    group.begin()
    for call, numel in enumerate((1, 2, 640, 1025, CAPACITY, 3)):
        sent = [torch.randn(numel, device=device) for _ in range(shards)]
        torch.cuda.synchronize()
        got = []
        for side, stream, values in zip(sides, streams, sent, strict=True):
            with torch.cuda.stream(stream):
                got.append(side.stack(values))
        torch.cuda.synchronize()
        for result in got:
            assert torch.equal(result, torch.stack(sent)), call


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_norms_of_streams_exchange_and_combine(shards: int) -> None:
    group = Shards(shards)
    sides, streams, device = group.sides, group.streams, group.memory.device
    slabs = [torch.randn(2, 20, 3 + rank, 5, 4, device=device) * 3 + 7 for rank in range(shards)]
    gradients = [torch.randn_like(slab) for slab in slabs]
    weight, bias, activation = torch.rand(20, device=device), torch.rand(20, device=device), Activation("leaky", 0.1)
    shares = choice.compute_shares(tuple(slab[0, 0].numel() for slab in slabs), torch.float32, device)
    voxels = sum(slab[0, 0].numel() for slab in slabs)
    moments = torch.stack([choice.moments(slab) for slab in slabs])
    wanted = reference.coefficients(moments, shares, weight, bias, 1e-5, None)
    mean, _, rstd, scale, shift = wanted
    rows = zip(gradients, slabs, strict=True)
    sums = torch.stack(
        [choice.gradient_sums_of_parts(own, Term(slab, mean, scale, shift, activation)).sum(0) for own, slab in rows]
    )
    wanted_back = reference.backward_coefficients(sums, mean, rstd, weight, voxels, None)[:2]

    def exchanged() -> tuple[list[Tensor], list[Tensor]]:
        got, back = [], []
        for rank, stream in enumerate(streams):
            box = sides[rank] if shards > 1 else None
            with torch.cuda.stream(stream):
                got.append(exchanges.exchange_coefficients(slabs[rank], shares, weight, bias, 1e-5, box).found)
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            box = sides[rank] if shards > 1 else None
            with torch.cuda.stream(stream):
                term = Term(slabs[rank], mean, scale, shift, activation)
                parts = choice.gradient_sums_of_parts(gradients[rank], term)
                found = exchanges.exchange_backward_coefficients(parts, mean, rstd, weight, voxels, box)
                back.append(torch.stack([found.factor, found.offset]))
        torch.cuda.synchronize()
        return got, back

    exchanged()
    group.begin()
    for _ in range(3):
        for results, expected in zip(exchanged(), (wanted, wanted_back), strict=True):
            for result in results:
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
                assert result.equal(results[0])


@pytest.mark.gpu
def test_who_does_not_come_leaves_nan() -> None:
    memory = torch.zeros(2, ValueMailbox.size(2), dtype=torch.uint8, device="cuda")
    alone = ValueMailbox([box.data_ptr() for box in memory], 0, memory.device, patience=100)
    own, other = alone.stack(torch.ones(3, device="cuda"))
    assert (own == 1).all()
    assert other.isnan().all()


@pytest.mark.multi_gpu
def test_processes_exchange_eagerly_and_from_graphs(tmp_path: Path) -> None:
    launch([__file__, str(tmp_path)], processes=torch.cuda.device_count())
    for rank in range(torch.cuda.device_count()):
        assert (tmp_path / str(rank)).read_text(encoding="utf-8") == "equal"


def exchange(folder: Path) -> None:
    start_group()
    rank, shards = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    group = ProcessGroupShards(dist.group.WORLD, [shards], device)
    assert group.mailbox is not None
    values = torch.zeros(2, 5, 32, device=device)

    def rounds() -> list[torch.Tensor]:
        return [group.stack(values + number) for number in range(7)]

    def check(results: list[torch.Tensor], base: float) -> None:
        for number, result in enumerate(results):
            for sender in range(shards):
                assert torch.equal(result[sender], torch.full_like(values, base + sender + number))

    for repeat in range(20):
        values.fill_(rank + 10.0 * repeat)
        if rank == repeat % shards:  # one is late
            torch.cuda._sleep(10_000_000)
        check(rounds(), 10.0 * repeat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = rounds()
    for repeat in range(20):
        values.fill_(rank + 100.0 * repeat)
        if rank == repeat % shards:
            torch.cuda._sleep(10_000_000)
        graph.replay()
        check(recorded, 100.0 * repeat)
    large = torch.full((CAPACITY + 1,), float(rank), device=device)  # NCCL's
    assert torch.equal(group.stack(large)[:, 0], torch.arange(float(shards), device=device))
    (folder / str(rank)).write_text("equal", encoding="utf-8")
    del graph
    dist.destroy_process_group()


if __name__ == "__main__":
    exchange(Path(sys.argv[1]))
