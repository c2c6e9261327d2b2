"""Exchange through GPU memory that the other processes of the host write directly: the memory, and one side of it.

The memory is shared by CUDA's inter-process handles. torch's own sharing opens a handle on its source device, which
costs each process a context, half a gigabyte, on every other GPU. The driver maps the memory into the own device's
context, and a kernel needs no more.

Memory may be freed only when no process has it mapped, and nothing may be freed while a CUDA graph is recorded, when
Python may collect unreferenced objects. So released memory waits: the next time that its processes share memory, all
unmap it, report this to each other, and free it.
"""

import ctypes
import logging
import socket
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from volseg.device import triton_tiles
from volseg.device.gpus import has_values, is_gpu, is_recording
from volseg.errors import ParallelError

LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``, the only existing flag."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


class Driver:
    """CUDA's driver on one GPU; as a context, it makes that GPU the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Self:
        self._selected = torch.cuda.device(self.device)
        self._selected.__enter__()
        self.synchronize()  # creates the device's context
        return self

    def __exit__(self, *fault: object) -> None:
        self._selected.__exit__(*fault)

    @property
    def place(self) -> tuple[str, str]:
        """Host and GPU."""
        return socket.gethostname(), str(torch.cuda.get_device_properties(self.device).uuid)

    def synchronize(self) -> None:
        """Wait for all work on the GPU."""
        torch.cuda.synchronize(self.device)

    def allocate(self, size: int) -> int:
        """Return the address of new memory, all zeros."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", f"allocate {size} bytes to share", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", "clear memory", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Free memory that no process has mapped."""
        self._call("cuMemFree_v2", "free shared memory", ctypes.c_uint64(address))

    def offer(self, address: int) -> bytes:
        """Return a handle by which other processes map the memory."""
        handle = _Handle()
        what = "share memory with other processes"
        self._call("cuIpcGetMemHandle", what, ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Map another process's memory, and return its address here."""
        address = ctypes.c_uint64()
        given, flags = _Handle.from_buffer_copy(handle), ctypes.c_uint(LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", "map another GPU's memory", ctypes.byref(address), given, flags)
        return address.value

    def unmap(self, address: int) -> None:
        """Unmap another process's memory."""
        self._call("cuIpcCloseMemHandle", "unmap another GPU's memory", ctypes.c_uint64(address))

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
        if result:
            raise ParallelError(f"CUDA's driver could not {what}: error {result}")


@dataclass(frozen=True)
class _Gone:
    """Shared memory that this process no longer uses; all processes have the same ``key`` for it."""

    key: tuple[tuple[int, ...], int]
    device: torch.device
    own: int
    mapped: list[int] = field(default_factory=list)


_gone: list[_Gone] = []
_times_shared: Counter[tuple[int, ...]] = Counter()


class PeerMemory:
    """Memory on the GPU of every process of a group.

    It exists as long as this object, which its readers and writers hold: a mailbox, its communicator, its strategy, and
    so each recorded step of the strategy's model.

    Attributes
    ----------
    addresses
        Address of each process's memory in this process, in the order of the group.
    rank
        This process's number in the group.
    """

    def __init__(self, addresses: list[int], rank: int, gone: _Gone) -> None:
        self.addresses, self.rank = addresses, rank
        weakref.finalize(self, _gone.append, gone).atexit = False


def share_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> PeerMemory | None:
    """Return ``size`` bytes, all zeros, on the GPU of every process of the group.

    All processes call this, and all get None if one of them fails: several hosts, processes that share a GPU, or GPUs
    that cannot reach each other's memory.
    """
    rank, ranks = dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    key = ranks, _times_shared[ranks]
    _times_shared[ranks] += 1
    offer: tuple[tuple[str, str], bytes] | None = None
    own, mapped = 0, []
    with Driver(device) as driver:
        unmapped = _unmap_gone(driver)
        try:
            own = driver.allocate(size)
            offer = driver.place, driver.offer(own)
        except (OSError, AttributeError, ParallelError) as fault:  # the others still wait for this process
            _log_reason(fault)
        driver.synchronize()  # cleared before any process writes
        offers, of_all = zip(*_gather((offer, unmapped), group), strict=True)
        _free_gone(driver, [set(keys) for keys in of_all], ranks)
        places = [given[0] for given in offers if given is not None]
        if len({host for host, _ in places}) == 1 and len(set(places)) == len(ranks):
            try:
                for number, (_, handle) in enumerate(offers):
                    mapped.append(own if number == rank else driver.map(handle))
            except ParallelError as fault:
                _log_reason(fault)
    others = [address for address in mapped if address != own]
    memory = PeerMemory(mapped, rank, _Gone(key, device, own, others))
    return memory if all(_gather(len(mapped) == len(ranks), group)) else None


def _unmap_gone(driver: Driver) -> list[tuple[tuple[int, ...], int]]:
    """Unmap memory that others have shared and this process no longer uses; return the keys of all unmapped memory."""
    here = [gone for gone in _gone if gone.device == driver.device]
    for gone in here:
        while gone.mapped:
            driver.unmap(gone.mapped.pop())
    return [gone.key for gone in here]


def _free_gone(driver: Driver, unmapped: list[set[Any]], ranks: tuple[int, ...]) -> None:
    """Free this process's memory that all others have unmapped; ``unmapped`` are the keys of each rank."""
    named = dict(zip(ranks, unmapped, strict=True))
    for gone in [gone for gone in _gone if gone.device == driver.device]:
        members, _ = gone.key
        if not gone.mapped and all(gone.key in named.get(member, ()) for member in members):
            _gone.remove(gone)
            if gone.own:
                driver.free(gone.own)


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every process's value."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _log_reason(fault: Exception) -> None:
    logger.info("GPUs exchange all data through NCCL, as they cannot write to each other's memory: %s", fault)


logger = logging.getLogger(__name__)

PATIENCE = 2**30
"""Number of reads of a missing word before the result is NaN: some ten minutes, NCCL's default, for any timeout of the
group. A process that is later, or has died, so shows in the loss, which the training loop refuses."""

PROBE = 2**22
"""Number of reads in the first exchange, which must end: mapped memory may still be out of reach."""


class Mailbox(ABC):
    """One process's side of the exchange.

    Parameters
    ----------
    boxes
        Addresses, in this process, of the boxes of all processes in the order of the group.
    rank
        This process's number in the group.
    device
        GPU of this process.
    patience
        Number of reads of a missing word before the result is NaN.
    memory
        Memory of the boxes, held as long as the mailbox.

    Notes
    -----
    All processes make calls in the same order, on streams that wait for each other, also in a CUDA graph; the mailbox
    must be held for the graph's replays.
    """

    CARRIES: ClassVar[str]

    def __init__(
        self, boxes: Sequence[int], rank: int, device: torch.device, patience: int = PATIENCE, memory: Any = None
    ) -> None:
        self.rank, self.shards, self.patience, self.memory = rank, len(boxes), patience, memory
        # The number of calls so far, and of finished programs of the current call.
        self.calls = torch.zeros(2, dtype=torch.int32, device=device)

    @staticmethod
    @abstractmethod
    def size(shards: int) -> int:
        """Return the bytes of a box."""

    @abstractmethod
    def probe(self) -> bool:
        """Exchange a few values; return whether those of all processes arrived."""

    @classmethod
    def connect(cls, group: dist.ProcessGroup, device: torch.device) -> Self | None:
        """Return a mailbox of the group, or None if it is impossible; called by all processes of the group.

        Raises
        ------
        ParallelError
            While a CUDA graph is recorded: it cannot contain the wait for other processes.
        """
        shards = dist.get_world_size(group)
        if not is_gpu(device) or shards == 1 or not triton_tiles.available():
            return None
        if is_recording(device):
            raise ParallelError(
                "the first exchange between processes happened while a CUDA graph was being recorded; run the step "
                "once before recording it"
            )
        if not has_values(device):
            return cls([0] * shards, dist.get_rank(group), device)
        with torch.cuda.device(device):
            memory = share_memory(group, device, cls.size(shards))
            if memory is None:
                return None
            found = cls(memory.addresses, memory.rank, device, patience=0, memory=memory)
            found.probe()  # compiles, and waits for no other process
            reached = [True] * shards
            dist.all_gather_object(reached, True, group=group)
            found.patience = PROBE
            came = found.probe()
            found.patience = PATIENCE
            dist.all_gather_object(reached, came, group=group)
        if not all(reached):
            logger.info("GPUs exchange %s through NCCL, as direct writes do not reach other GPUs", cls.CARRIES)
            return None
        return found
