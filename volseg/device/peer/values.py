# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""Exchange a few kilobytes between all GPUs of a host in one kernel: the norms' statistics, dozens of times a step.

Other exchanges run the same kernel, and so get the same bits: see ``ValueExchange``.

Every process writes its values into the memory of all others, each with the number of the call in one word of 64 bits,
and waits until all words of its own memory have that number. No fence is needed, since such a word arrives whole
(NCCL's LL protocol). NCCL's all-gather does the same later, and queues behind the gradients' sums. ::

    box   | words of even calls, per sender | of odd calls |

Two sets of words are enough: a process that writes call ``n + 2`` has received all words of call ``n + 1``, and each
sender had read call ``n`` before it sent them. Values are read in the order of the grid, so sums agree bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.gpus import get_address
from volseg.device.peer.mailbox import PATIENCE, Mailbox
from volseg.device.torch_internals import gather_into
from volseg.device.triton_kernels import kernel, tl, triton

Result = TypeVar("Result")

CAPACITY = 8192
"""Limit of float32 values that one process sends: 2 statistics of 16 samples and 256 channels."""


@triton.jit
def put(value, i, mask, boxes, call, rank, SHARDS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write float32 values to this process's places ``i`` in the boxes of all processes."""
    word = (call << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    start = ((call & 1) * SHARDS + rank) * CAPACITY
    for peer in tl.static_range(SHARDS):
        tl.store(tl.load(boxes + peer).to(tl.pointer_type(tl.int64)) + start + i, word, mask=mask)


@triton.jit
def get(i, mask, boxes, call, rank, peer, patience, SHARDS: tl.constexpr, CAPACITY: tl.constexpr):
    """Wait for the values at the places ``i`` of a process; NaN if they do not arrive."""
    start = ((call & 1) * SHARDS + peer) * CAPACITY
    place = tl.load(boxes + rank).to(tl.pointer_type(tl.int64)) + start + i
    word = tl.load(place, mask=mask, other=0, volatile=True)
    looks = 0
    while (tl.max(((word >> 32 != call) & mask).to(tl.int32), 0) != 0) & (looks < patience):
        word = tl.load(place, mask=mask, other=0, volatile=True)
        looks += 1
    value = word.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(word >> 32 == call, value, float("nan"))


@triton.jit
def count(calls, call):
    """Count the call, once all programs of the kernel have reached this point."""
    tl.debug_barrier()
    if tl.atomic_add(calls + 1, 1) == tl.num_programs(0) - 1:
        tl.store(calls + 1, 0)
        tl.store(calls, call.to(tl.int32))


@kernel(do_not_specialize=["n", "rank", "patience"])
def _exchange_values_kernel(
    own, out, boxes, calls, n, rank, patience, SHARDS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    call = (tl.load(calls) + 1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    put(tl.load(own + i, mask=mask, other=0.0), i, mask, boxes, call, rank, SHARDS, CAPACITY)
    tl.debug_barrier()  # send everything before waiting
    for peer in tl.static_range(SHARDS):
        value = get(i, mask, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
        tl.store(out + peer * n + i, value, mask=mask)
    count(calls, call)


class ValueMailbox(Mailbox):
    """One process's side of the exchange of values; see ``Mailbox``, and ``ValueExchange``."""

    CARRIES = "statistics"

    def __init__(
        self, boxes: Sequence[int], rank: int, device: torch.device, patience: int = PATIENCE, memory: Any = None
    ) -> None:
        super().__init__(boxes, rank, device, patience, memory)
        self.boxes = torch.tensor(boxes, dtype=torch.int64).to(device)
        self.hears = True
        """Whether a running kernel has the values of all others: if it runs several times, only in the last run."""

    @staticmethod
    def size(shards: int) -> int:
        """Return the bytes of a box."""
        return 2 * shards * CAPACITY * 8

    @staticmethod
    def takes(partial: Tensor) -> bool:
        """Return whether the tensor can be sent."""
        return partial.dtype == torch.float32 and 0 < partial.numel() <= CAPACITY

    def describe(self) -> dict[str, Any]:
        """Return the keywords of a kernel that uses ``put``, ``get`` and ``count``."""
        return {
            "boxes": self.boxes,
            "calls": self.calls,
            "rank": self.rank,
            "patience": self.patience,
            "SHARDS": self.shards,
            "CAPACITY": CAPACITY,
        }

    def run(self, calls: Sequence["Callable[[ValueMailbox], Result]"], count: int) -> Result:
        """Run the kernel of this process's one slab, which waits for the other processes' values."""
        del count
        (call,) = calls
        return call(self)

    def stack(self, partial: Tensor) -> Tensor:
        """Return every process's tensor, ``(shards, ...)``; NaN for a missing one."""
        partial = partial.contiguous()
        out = partial.new_empty((self.shards, *partial.shape))
        _exchange_values_kernel[(triton.cdiv(partial.numel(), 512),)](
            partial, out, n=partial.numel(), **self.describe(), BLOCK=512, num_warps=4,
        )  # fmt: skip
        return out

    def probe(self) -> bool:
        """Exchange the ranks; return whether all arrived."""
        own = torch.full((1,), float(self.rank), device=self.calls.device)
        return bool(self.stack(own).flatten().tolist() == list(range(self.shards)))


class ValueExchange(Protocol):
    """Run kernels that send values, and use those of all shards, for the slabs of this process.

    With shards on one device, on GPUs of a host or on several hosts, the same kernel joins a slab's values, sends them,
    and adds the received values. So all get the same bits.
    """

    def run(self, calls: Sequence[Callable[[ValueMailbox], Result]], count: int) -> Result:
        """Return the kernel's result, once it has the values of all shards.

        Parameters
        ----------
        calls
            One call for each slab of this process: it runs a kernel that sends the slab's values and uses those of all.
        count
            Number of values that each slab sends.
        """
        ...


class ValuesOfSlabs:
    """Exchange values between slabs of one process: the kernels run one after the other without waiting.

    The last kernel finds the values of all others.

    Parameters
    ----------
    shards
        Number of slabs.
    device
        Device of the kernels.
    """

    def __init__(self, shards: int, device: torch.device) -> None:
        memory = torch.zeros(2, shards, CAPACITY, dtype=torch.int64, device=device)
        boxes = [get_address(memory)] * shards
        self.sides = [ValueMailbox(boxes, rank, device, patience=0, memory=memory) for rank in range(shards)]
        for side in self.sides[:-1]:
            side.hears = False

    def run(self, calls: Sequence[Callable[[ValueMailbox], Result]], count: int) -> Result:
        """Run all slabs' kernels."""
        del count
        return [call(side) for call, side in zip(calls, self.sides, strict=True)][-1]


class RelayedValues:
    """Exchange values by messages between processes that do not reach each other's memory.

    The kernels run once, and leave their values in a box of the process. The boxes are gathered, and the last kernel
    runs again.

    Parameters
    ----------
    group
        The processes.
    device
        This process's GPU.
    slabs
        Number of slabs of each process; the numbers of its slabs are neighbours.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slabs: int = 1) -> None:
        self.group, self.processes = group, dist.get_world_size(group)
        shards, first = slabs * self.processes, slabs * dist.get_rank(group)
        self.memory = torch.zeros(2, shards, CAPACITY, dtype=torch.int64, device=device)
        boxes = [get_address(self.memory)] * shards
        self.own = slice(first, first + slabs)
        self.sides = [ValueMailbox(boxes, first + n, device, patience=0, memory=self.memory) for n in range(slabs)]

    def run(self, calls: Sequence[Callable[[ValueMailbox], Result]], count: int) -> Result:
        """Run the kernels of this process's slabs before the others' values arrive, and then the last one again."""
        for call, side in zip(calls, self.sides, strict=True):
            side.hears = False
            call(side)
        own = self.memory[:, self.own, :count].contiguous()  # of even and of odd calls
        gathered = own.new_empty((self.processes, *own.shape))
        gather_into(gathered.view(-1), own.view(-1), group=self.group)
        self.memory[:, :, :count] = gathered.movedim(0, 1).flatten(1, 2)
        side.calls[:1].sub_(1)  # the same call
        side.hears = True
        return call(side)
