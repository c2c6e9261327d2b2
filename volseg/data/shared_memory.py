"""Tensors that lie in memory once per machine: one process writes them, the others map the same pages.

The memory is a file without a name (``memfd_create``), which another process opens by way of ``/proc/PID/fd`` while its
writer lives. It belongs to those who map it, and goes with the last of them, whatever ends it: there is nothing to
remove. It is no part of ``/dev/shm``, which is 64 MB in a container.

Every process maps it copy-on-write: who writes to such a tensor changes its own copy of a page and no other process's.
"""

import errno
import os
import threading
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "Place",
    "SharedTensors",
    "can_share",
    "map_file",
    "map_tensors",
    "place_of",
    "view_bytes",
    "view_tensor",
]

Place = list[Any]
"""Where a tensor lies: its first byte, type and shape. JSON."""

ALIGNMENT = 64
"""Bytes; as torch aligns its own memory."""


def can_share() -> bool:
    """Say whether this platform has what sharing takes."""
    return hasattr(os, "memfd_create") and os.path.isdir(f"/proc/{os.getpid()}/fd")


class SharedTensors:
    """Memory that this process fills, for the processes of its machine to map.

    Only one file is open however many tensors it holds. It stays open until ``close``; the others must have mapped it
    by then.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("volseg", os.MFD_CLOEXEC)
        self._size = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> list[int]:
        """Where other processes find the memory: this process's number and the file's."""
        return [os.getpid(), self._file]

    def add(self, tensor: Tensor) -> Place:
        """Copy a tensor's values into the memory; return their place. From any thread."""
        values = tensor.detach().cpu().contiguous()
        content = view_bytes(values)
        with self._lock:
            begin = self._size
            self._size += -(-len(content) // ALIGNMENT) * ALIGNMENT
            os.ftruncate(self._file, self._size)
        written = 0
        while written < len(content):  # Linux writes 2 GiB at a time
            written += os.pwrite(self._file, content[written:], begin + written)
        return place_of(values, begin)

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def view_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which are not copied."""
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def place_of(values: Tensor, begin: int) -> Place:
    """Return the place of a contiguous tensor whose bytes are written from ``begin`` on."""
    return [begin, str(values.dtype).removeprefix("torch."), list(values.shape)]


def map_tensors(address: list[int]) -> torch.UntypedStorage | None:
    """Map what a process of this machine has filled; None where it holds nothing.

    Raises
    ------
    OSError
        If the process has ended, or may not be looked into.
    """
    path = "/proc/{}/fd/{}".format(*address)
    size = os.stat(path).st_size
    return map_file(path, size) if size else None


def map_file(path: str, size: int) -> torch.UntypedStorage:
    """Map the first bytes of a file copy-on-write; the mapping lives as long as one of its tensors.

    Raises
    ------
    OSError
        If the file is gone or may not be read, or the system allows no more address space.
    """
    try:
        # Not Python's mmap, each of which keeps a descriptor: a process may have a thousand of them.
        mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=size)
    except RuntimeError as fault:
        raise OSError(errno.ENOMEM, str(fault).partition("\n")[0]) from fault
    storage: torch.UntypedStorage = mapped
    return storage


def view_tensor(mapped: torch.UntypedStorage, place: Place) -> Tensor:
    """Return a tensor of mapped memory."""
    begin, dtype, shape = place
    values = torch.empty(0, dtype=getattr(torch, dtype))
    return values.set_(mapped, begin // values.element_size(), shape)  # type: ignore[call-overload]
