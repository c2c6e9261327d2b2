"""Values sent from GPU to GPU by one kernel arrive, in order, call after call.

``python test_mailbox.py FOLDER`` in each process of a group writes what it found.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from volseg.parallel import launch
from volseg.parallel.sharding.group import ProcessGroupShards
from volseg.parallel.sharding.mailbox import CAPACITY, Mailbox
from volseg.parallel.sharding.processes import start_group


def test_what_can_be_sent() -> None:
    assert Mailbox.takes(torch.zeros(2, 3))
    assert Mailbox.takes(torch.zeros(CAPACITY))
    assert not Mailbox.takes(torch.zeros(CAPACITY + 1))
    assert not Mailbox.takes(torch.zeros(0))
    assert not Mailbox.takes(torch.zeros(2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_streams_of_one_gpu_exchange(shards: int) -> None:
    memory = torch.zeros(shards, Mailbox.size(shards), dtype=torch.uint8, device="cuda")
    device = memory.device
    boxes = [box.data_ptr() for box in memory]
    sides = [Mailbox(boxes, rank, device) for rank in range(shards)]
    streams = [torch.cuda.Stream() for _ in range(shards)]
    sides[0].stack(torch.zeros(1, device=device), patience=1)  # compiled before anybody waits
    for side in sides:
        side.calls.zero_()
    memory.zero_()
    torch.cuda.synchronize()
    for call, numel in enumerate((1, 2, 640, 1025, CAPACITY, 3)):
        sent = [torch.randn(numel, device=device) for _ in range(shards)]
        torch.cuda.synchronize()
        got = []
        for side, stream, values in zip(sides, streams, sent, strict=True):
            with torch.cuda.stream(stream):
                got.append(side.stack(values, patience=2**22))
        torch.cuda.synchronize()
        for result in got:
            assert torch.equal(result, torch.stack(sent)), call


@pytest.mark.gpu
def test_who_does_not_come_leaves_nan() -> None:
    memory = torch.zeros(2, Mailbox.size(2), dtype=torch.uint8, device="cuda")
    alone = Mailbox([box.data_ptr() for box in memory], 0, memory.device)
    own, other = alone.stack(torch.ones(3, device="cuda"), patience=100)
    assert (own == 1).all()
    assert other.isnan().all()


@pytest.mark.multi_gpu
def test_processes_exchange_eagerly_and_from_graphs(tmp_path: Path) -> None:
    launch([__file__, str(tmp_path)], processes=torch.cuda.device_count())
    for rank in range(torch.cuda.device_count()):
        assert (tmp_path / str(rank)).read_text() == "equal"


def exchange(folder: Path) -> None:
    start_group()
    rank, shards = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    assert dist.group.WORLD is not None
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
    (folder / str(rank)).write_text("equal")
    del graph
    dist.destroy_process_group()


if __name__ == "__main__":
    exchange(Path(sys.argv[1]))
