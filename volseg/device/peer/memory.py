"""Memory of this process's GPU that the other processes of its host write to directly: CUDA's inter-process handles.

torch's own sharing opens a handle on the device it came from, which costs each process a context, half a gigabyte, on
every GPU of the others. The driver maps it into the own device's context, which is all that a kernel needs.
"""

import ctypes
import logging
import socket
from typing import Any

import torch
import torch.distributed as dist

from volseg.errors import ParallelError

__all__ = ["map_together"]

logger = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


LAZY_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``, the only flag there is."""


def _checked(result: int, what: str) -> None:
    if result:
        raise ParallelError(f"CUDA's driver could not {what}: error {result}")


def _allocated(driver: Any, size: int) -> tuple[int, bytes]:
    """Return the address and the handle of new memory, all zeros, which stays for as long as the process lives."""
    address, handle = ctypes.c_uint64(), _Handle()
    _checked(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"allocate {size} bytes to share")
    _checked(driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(size)), "clear memory")
    _checked(driver.cuIpcGetMemHandle(ctypes.byref(handle), address), "share memory with other processes")
    return address.value, bytes(handle)


def _mapped(driver: Any, handle: bytes) -> int:
    address = ctypes.c_uint64()
    result = driver.cuIpcOpenMemHandle_v2(
        ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(LAZY_PEER_ACCESS)
    )
    _checked(result, "map another GPU's memory")
    return address.value


def map_together(group: dist.ProcessGroup, device: torch.device, size: int) -> list[int] | None:
    """Return the addresses, in this process, of ``size`` bytes on the GPU of every process of the group.

    All processes call it, and all get None where one could not: several hosts, processes that share a GPU, or GPUs
    that cannot reach each other's memory.
    """
    rank, shards = dist.get_rank(group), dist.get_world_size(group)
    offer: tuple[str, str, bytes] | None = None
    own = 0
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # by now the device's context is there
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            own, handle = _allocated(driver, size)
            offer = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid), handle
        except (OSError, AttributeError, ParallelError) as fault:  # whatever it is, the others wait for this one's word
            logger.info("GPUs exchange all through NCCL, for they cannot write to each other's memory: %s", fault)
        torch.cuda.synchronize(device)  # cleared, before anybody writes
        offers: list[Any] = [None] * shards
        dist.all_gather_object(offers, offer, group=group)
        if None in offers or len({host for host, *_ in offers}) > 1 or len({gpu for _, gpu, _ in offers}) < shards:
            return None
        try:
            addresses = [own if i == rank else _mapped(driver, handle) for i, (*_, handle) in enumerate(offers)]
        except ParallelError as fault:
            logger.info("GPUs exchange all through NCCL, for they cannot write to each other's memory: %s", fault)
            addresses = []
    votes = [False] * shards
    dist.all_gather_object(votes, bool(addresses), group=group)
    return addresses if all(votes) else None
