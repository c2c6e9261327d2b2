"""Memory shared by processes exists as long as a process uses it, and is freed with its last mapping.

Each process of a group runs ``CASES`` with a driver that only writes down what it is asked for.
"""

import gc
import weakref
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from torch import nn

from volseg.device.peer import mailbox as peer_memory
from volseg.device.peer.mailbox import PeerMemory, share_memory
from volseg.device.peer.values import ValueMailbox
from volseg.errors import ParallelError
from volseg.parallel import ModelParallel
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards

CPU = torch.device("cpu")


class Ledger:
    """A driver without a GPU that records allocations, mappings and messages to the other process."""

    allocated: set[int] = set()  # noqa: RUF012  (of the process, as a GPU's)
    mapped: set[int] = set()  # noqa: RUF012
    count = 0
    refuses = ""
    one_gpu = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        pass

    @property
    def place(self) -> tuple[str, str]:
        return "host", "GPU" if Ledger.one_gpu else f"GPU {dist.get_rank()}"

    def synchronize(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        if Ledger.refuses == "allocate":
            raise ParallelError("no memory")
        Ledger.count += 1
        Ledger.allocated.add(Ledger.count + 1000 * dist.get_rank())
        return Ledger.count + 1000 * dist.get_rank()

    def free(self, address: int) -> None:
        Ledger.allocated.remove(address)

    def offer(self, address: int) -> bytes:
        return str(address).encode()

    def map(self, handle: bytes) -> int:
        if Ledger.refuses == "map":
            raise ParallelError("no way")
        Ledger.mapped.add(int(handle))
        return int(handle)

    def unmap(self, address: int) -> None:
        Ledger.mapped.remove(address)


def share() -> PeerMemory | None:
    return share_memory(dist.group.WORLD, CPU, 64)


def others_allocated() -> set[int]:
    """Return the allocations on all other processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, Ledger.allocated)
    return set().union(*(some for rank, some in enumerate(found) if rank != dist.get_rank()))


def memory_goes_with_who_holds_it() -> None:
    first = share()
    assert first.rank == dist.get_rank()
    assert {address // 1000 for address in first.addresses} == {0, 1}
    second = share()
    assert not set(first.addresses) & set(second.addresses)
    assert len(Ledger.allocated) == 2  # both are held
    del first
    gc.collect()
    assert len(Ledger.allocated) == len(Ledger.mapped) == 2  # nothing happens while Python collects
    third = share()
    assert third is not None
    assert len(Ledger.allocated) == len(Ledger.mapped) == 2
    assert Ledger.mapped == others_allocated()
    del second, third
    for _ in range(5):
        kept = share()
        assert len(Ledger.allocated) <= 2
        del kept


def what_another_process_still_uses_stays() -> None:
    mine = share()
    assert mine is not None
    if dist.get_rank() == 0:  # Python collects when it likes, on each process
        del mine
    for _ in range(2):
        held = share()
        assert Ledger.mapped <= others_allocated()
    if dist.get_rank() == 1:
        assert set(mine.addresses) <= Ledger.mapped | Ledger.allocated
        del mine
    del held
    last = share()
    assert last is not None
    assert Ledger.mapped == others_allocated()
    assert len(Ledger.allocated) == 1


def who_cannot_share_tells_the_others() -> None:
    for refusal in ("allocate", "map"):
        Ledger.refuses = refusal if dist.get_rank() == 1 else ""
        assert share() is None
    Ledger.refuses = ""
    Ledger.one_gpu = True
    assert share() is None
    Ledger.one_gpu = False
    kept = share()
    assert Ledger.allocated == {kept.addresses[kept.rank]}  # nothing is left of those that failed
    assert Ledger.mapped == others_allocated()


def a_models_mailbox_goes_with_the_model() -> None:
    model = ModelParallel(nn.Conv3d(1, 1, 3, padding=1), strategy="spatial")
    communicator = model.strategy.communicator
    assert isinstance(communicator, ProcessGroupShards)
    shared = share()
    communicator.mailbox = ValueMailbox(shared.addresses, shared.rank, CPU, memory=shared)
    shares = communicator.shares((2, 3), torch.float32, CPU)
    assert communicator.shares((2, 3), torch.float32, CPU) is shares  # recorded steps read it from where it lies
    torch.testing.assert_close(shares.flatten(), torch.tensor([0.4, 0.6]))
    kept = [weakref.ref(thing) for thing in (shared, communicator.mailbox, shares)]
    own = shared.addresses[shared.rank]
    del shared, shares
    gc.collect()
    assert all(thing() is not None for thing in kept)
    strategy = model.strategy  # what a recording holds
    del model, communicator
    gc.collect()
    assert all(thing() is not None for thing in kept)
    del strategy
    gc.collect()
    assert all(thing() is None for thing in kept)
    assert own in Ledger.allocated
    share()
    assert own not in Ledger.allocated


CASES = {
    case.__name__: case
    for case in (
        memory_goes_with_who_holds_it,
        what_another_process_still_uses_stays,
        who_cannot_share_tells_the_others,
        a_models_mailbox_goes_with_the_model,
    )
}


def run_case(name: str) -> None:
    with mock.patch.object(peer_memory, "Driver", Ledger):
        CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_shared_memory(name: str) -> None:
    in_group(2, run_case, name)
