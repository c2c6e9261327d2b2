"""GPUs that are not there: devices without values, which this process takes for GPUs of a given kind.

A step that is only followed (``volseg.forecast.following``) runs on fake tensors of the CPU: autograd of a CPU build of
torch aborts on fake tensors of CUDA. While this process pretends, ``torch.device("cpu", i)`` stands for GPU i, and
``torch.device("cpu")``, without a number, is the host. Whether something lies on a GPU, what that GPU can do, and its
streams are therefore asked for here, and not with ``is_cuda`` and ``torch.cuda``.

Outside of ``pretending`` all questions have torch's answers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from volseg.errors import ParallelError

__all__ = [
    "GpuLike",
    "NotedKernel",
    "PretendedEvent",
    "PretendedStream",
    "count_processors",
    "find_capability",
    "find_current_stream",
    "find_pretended",
    "find_recording",
    "is_gpu",
    "is_recording",
    "make_event",
    "make_stream",
    "name_pretended",
    "note_kernel",
    "on_gpu",
    "on_stream",
    "pretend_recording",
    "pretending",
]


class GpuLike(Protocol):
    """What is asked of a kind of GPU."""

    @property
    def name(self) -> str:
        """As its vendor calls it."""

    @property
    def processors(self) -> int:
        """Multiprocessors."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""


@dataclass(frozen=True, slots=True)
class NotedKernel:
    """A kernel of ours that was asked for, and did not run."""

    name: str
    """Of its function, with its module: ``convolution.few_taps._forward_kernel``."""
    grid: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    """What it was given by name: what it is compiled for, ``num_warps``."""


@dataclass(eq=False)
class _Pretence:
    gpu: GpuLike
    note: Callable[[NotedKernel], None] | None
    streams: int = 0
    current: "dict[torch.device, PretendedStream]" = field(default_factory=dict)
    recording: str = ""


_pretence: _Pretence | None = None


@contextmanager
def pretending(gpu: GpuLike, note: Callable[[NotedKernel], None] | None = None) -> Iterator[None]:
    """Take ``name_pretended(i)`` for GPU i of a kind; ``note`` is told of each kernel of ours that would run.

    Raises
    ------
    ParallelError
        If the process pretends already.
    """
    global _pretence
    if _pretence is not None:
        raise ParallelError(f"this process already pretends to have GPUs ({_pretence.gpu.name}); end that first")
    _pretence = _Pretence(gpu, note)
    try:
        yield
    finally:
        _pretence = None


def name_pretended(index: int) -> torch.device:
    """Return the device that stands for a GPU of this number."""
    return torch.device("cpu", index)


def find_pretended() -> GpuLike | None:
    """Return the kind of GPU that this process pretends to have, None where it does not pretend."""
    return None if _pretence is None else _pretence.gpu


def note_kernel(kernel: NotedKernel) -> None:
    """Put down that a kernel would run."""
    assert _pretence is not None
    if _pretence.note is not None:
        _pretence.note(kernel)


def is_gpu(device: torch.device) -> bool:
    """Say whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or (_pretence is not None and device.type == "cpu" and device.index is not None)


def on_gpu(tensor: Tensor) -> bool:
    """Say whether a tensor lies on a GPU, or on a device that stands for one."""
    return tensor.is_cuda or (_pretence is not None and is_gpu(tensor.device))


def find_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device) if _pretence is None else _pretence.gpu.capability


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 for a CPU."""
    if _pretence is not None and is_gpu(device):
        return _pretence.gpu.processors
    return _read_processors(device) if device.type == "cuda" else 1


@lru_cache(maxsize=8)  # asked before most launches
def _read_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# Recordings.


def is_recording(device: torch.device) -> bool:
    """Say whether a CUDA graph is being recorded on a device's current stream."""
    if _pretence is not None and is_gpu(device):
        return bool(_pretence.recording)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def find_recording() -> str:
    """Return the name of the pool that a pretended recording takes its memory from; empty where nothing is recorded."""
    return "" if _pretence is None else _pretence.recording


@contextmanager
def pretend_recording(pool: str) -> Iterator[None]:
    """Pretend that what runs is recorded, with memory from a pool of this name."""
    assert _pretence is not None
    before, _pretence.recording = _pretence.recording, pool
    try:
        yield
    finally:
        _pretence.recording = before


# Streams and events.


@dataclass(eq=False)
class PretendedEvent:
    """A point in the work of a stream: there is nothing to wait for."""

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Refuse: nothing that is pretended takes time."""
        raise ParallelError(f"a step that is followed without a GPU takes no time to measure, up to {end}")


@dataclass(eq=False)
class PretendedStream:
    """A stream of a GPU that is not there; memory that is taken on it is noted with its number."""

    device: torch.device
    number: int

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all that is pretended runs in order."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """Return the event."""
        return PretendedEvent() if event is None else event

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True


def make_stream(device: torch.device, **options: Any) -> Any:
    """Return a new stream of a GPU: ``torch.cuda.Stream``."""
    if _pretence is None:
        return torch.cuda.Stream(device, **options)
    _pretence.streams += 1
    return PretendedStream(device, _pretence.streams)


def make_event(**options: Any) -> Any:
    """Return a new event: ``torch.cuda.Event``."""
    return torch.cuda.Event(**options) if _pretence is None else PretendedEvent()


def find_current_stream(device: torch.device) -> Any:
    """Return the stream of a GPU on which work is put now."""
    if _pretence is None:
        return torch.cuda.current_stream(device)
    return _pretence.current.setdefault(device, PretendedStream(device, 0))


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Put the work of a block on a stream: ``torch.cuda.stream``."""
    return _pretend_stream(stream) if isinstance(stream, PretendedStream) else torch.cuda.stream(stream)


@contextmanager
def _pretend_stream(stream: PretendedStream) -> Iterator[None]:
    assert _pretence is not None
    before = find_current_stream(stream.device)
    _pretence.current[stream.device] = stream
    try:
        yield
    finally:
        _pretence.current[stream.device] = before
