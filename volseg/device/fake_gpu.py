"""Fake GPUs with which ``volseg.estimate`` replaces real ones; only `gpus` reads them.

A step that is only traced runs on fake tensors of the CPU: autograd of a CPU build of torch aborts on fake tensors of
CUDA. While a thread fakes GPUs, ``torch.device("cpu", i)`` stands for GPU i, and ``torch.device("cpu")``, without a
number, is the host. Other threads, which may copy cases to real GPUs meanwhile, see the GPUs as they are. What a trace
must know and no operator of torch says goes to one `GpuObserver`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from volseg.errors import ParallelError


class GpuLike(Protocol):
    """A kind of GPU."""

    @property
    def name(self) -> str:
        """Name by its vendor."""

    @property
    def processors(self) -> int:
        """Number of multiprocessors."""

    @property
    def memory(self) -> int:
        """Memory in bytes."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""


@dataclass(frozen=True, slots=True)
class NotedKernel:
    """A kernel of volseg that was requested, and did not run."""

    name: str
    """Name of its function, with the module: ``convolution.few_taps._forward_kernel``."""
    grid: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    """Arguments by name: the constants of its compilation, ``num_warps``."""


class GpuObserver:
    """Receiver of events on fake GPUs outside of torch's operators; by default it ignores all events."""

    def on_kernel(self, kernel: NotedKernel) -> None:
        """Take a kernel of volseg that would run."""

    def on_sent(self, device: torch.device, kind: str, size: int, devices: int = 2) -> None:
        """Take data that leave a GPU: the way (``Sent.kind``), the number of bytes, and the number of GPUs."""

    def on_resized(self, tensor: Tensor) -> None:
        """Take a tensor whose memory was freed or allocated again."""

    def on_used(self, tensor: Tensor, stream: int) -> None:
        """Take a tensor that a stream other than its own uses."""

    def on_mark(self, name: str) -> None:
        """Take the start of a part of the step; see ``volseg.estimate.trace.Mark``."""

    def read_clock(self, device: torch.device) -> float:
        """Return the seconds that all work of a GPU so far should take."""
        raise ParallelError(f"no observer of {device}, a fake GPU, knows how long its work takes")


@dataclass(eq=False)
class FakeGpus:
    """The GPUs that a thread fakes."""

    gpu: GpuLike
    observer: GpuObserver
    recording: str = ""
    """Name of the memory pool of the traced recording; empty without a recording."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """Objects that belong to the fake GPUs, and end with them."""
    thread: int = field(default_factory=get_ident)


_fake: FakeGpus | None = None


def get_fake() -> FakeGpus | None:
    """Return the fake GPUs of this thread, or None: other threads see the real GPUs."""
    return _fake if _fake is None or _fake.thread == get_ident() else None


@contextmanager
def faking(gpu: GpuLike, observer: GpuObserver | None = None) -> Iterator[None]:
    """Make ``fake_device(i)`` stand for GPU i of a kind within the block.

    Parameters
    ----------
    gpu
        The kind.
    observer
        Receives the events on the GPUs.

    Raises
    ------
    ParallelError
        If the process fakes GPUs already.
    """
    global _fake
    if _fake is not None:
        raise ParallelError(f"this process already fakes GPUs ({_fake.gpu.name}); end that first")
    _fake = FakeGpus(gpu, observer or GpuObserver())
    try:
        yield
    finally:
        _fake = None


def fake_device(index: int) -> torch.device:
    """Return the device that stands for a GPU of this number."""
    return torch.device("cpu", index)
