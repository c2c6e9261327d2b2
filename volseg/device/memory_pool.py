"""Separate memory pool of a GPU for one purpose: its blocks do not fragment the memory of others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from volseg.device.gpus import fake_recording, has_values

__all__ = ["MemoryPool"]


class MemoryPool:
    """A part of torch's allocator.

    Parameters
    ----------
    name : str
        Name of its purpose, for traces without a GPU.
    device : torch.device
        Device of the pool; a CPU has no separate pool.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allocate from the pool in this thread."""
        if self._pool is not None:
            with torch.cuda.use_mem_pool(self._pool, self.device):
                yield
        elif not has_values(self.device):
            with fake_recording(self.name):
                yield
        else:
            yield
