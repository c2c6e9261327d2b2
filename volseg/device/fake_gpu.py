"""GPUs, real or fake: the one place that is asked where a tensor lies, and what a GPU can do.

A step that is only traced (``volseg.estimate``) runs on fake tensors of the CPU: autograd of a CPU build of torch
aborts on fake tensors of CUDA. While a thread fakes GPUs, ``torch.device("cpu", i)`` stands for GPU i, and
``torch.device("cpu")``, without a number, is the host. So these questions are asked here, and not with ``is_cuda`` and
``torch.cuda``; streams are asked for in `streams`. What a trace must know and no operator of torch says goes to one
`GpuObserver`.

Outside of ``faking`` all questions have torch's answers, and so they have in other threads, which may copy cases to
real GPUs meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from volseg.device.fake_internals import FakeTensor
from volseg.device.torch_internals import without_dispatch_modes
from volseg.errors import ParallelError

__all__ = [
    "GpuLike",
    "GpuObserver",
    "NotedKernel",
    "count_free_bytes",
    "count_processors",
    "empty_cache",
    "fake_device",
    "fake_recording",
    "faking",
    "find_address",
    "find_capability",
    "find_device",
    "find_kept",
    "find_readable",
    "find_recording",
    "has_values",
    "host_values",
    "is_gpu",
    "is_recording",
    "keeping",
    "move_in_place",
    "note_kernel",
    "note_mark",
    "note_ordered",
    "note_sent",
    "note_shared_memory",
    "note_used",
    "on_gpu",
    "read_clock",
    "release_cache",
    "resize_memory",
]


Kept = TypeVar("Kept")


class GpuLike(Protocol):
    """A kind of GPU."""

    @property
    def name(self) -> str:
        """As its vendor calls it."""

    @property
    def processors(self) -> int:
        """Multiprocessors."""

    @property
    def memory(self) -> int:
        """Bytes."""

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
    """Arguments by name: what it is compiled for, ``num_warps``."""


class GpuObserver:
    """Gets what happens on fake GPUs beside operators of torch; by default it ignores all of it."""

    def on_kernel(self, kernel: NotedKernel) -> None:
        """Take a kernel of ours that would run."""

    def on_shared_memory(self, device: torch.device, size: int) -> None:
        """Take bytes that a GPU gives beside torch's allocator, for others to write to."""

    def on_sent(self, device: torch.device, kind: str, size: int, devices: int) -> None:
        """Take data that leave a GPU: in which way (``Sent.kind``), how many bytes, among how many GPUs."""

    def on_resized(self, tensor: Tensor) -> None:
        """Take a tensor whose memory was given back, or taken again."""

    def on_used(self, tensor: Tensor, stream: int) -> None:
        """Take a tensor that another stream than its own uses."""

    def on_ordered(self, device: torch.device, stream: int, event: int, waits: bool) -> None:
        """Take a stream that records an event of a number, or waits for it."""

    def on_mark(self, name: str) -> None:
        """Take the begin of a part of the step; see ``volseg.estimate.trace.Mark``."""

    def read_clock(self, device: torch.device) -> float:
        """Return the seconds that all work of a GPU so far should take."""
        raise ParallelError(f"no observer of {device}, a fake GPU, knows how long its work takes")


@dataclass(eq=False)
class _Fake:
    gpu: GpuLike
    observer: GpuObserver
    recording: str = ""
    kept: dict[Any, Any] = field(default_factory=dict)
    thread: int = field(default_factory=get_ident)


_fake: _Fake | None = None


def _find_fake() -> _Fake | None:
    """Return what this thread fakes: for all others the GPUs are what they are."""
    return _fake if _fake is None or _fake.thread == get_ident() else None


@contextmanager
def faking(gpu: GpuLike, observer: GpuObserver | None = None) -> Iterator[None]:
    """Take ``fake_device(i)`` for GPU i of a kind.

    Parameters
    ----------
    gpu
        The kind.
    observer
        Gets what happens there.

    Raises
    ------
    ParallelError
        If the process fakes GPUs already.
    """
    global _fake
    if _fake is not None:
        raise ParallelError(f"this process already fakes GPUs ({_fake.gpu.name}); end that first")
    _fake = _Fake(gpu, observer or GpuObserver())
    try:
        yield
    finally:
        _fake = None


def fake_device(index: int) -> torch.device:
    """Return the device that stands for a GPU of this number."""
    return torch.device("cpu", index)


def has_values(device: torch.device | None = None) -> bool:
    """Say whether tensors have values: not while a step is traced, on the fake GPUs or, without a device, at all."""
    return _fake is None or _find_fake() is None or (device is not None and not is_gpu(device))


def read_clock(device: torch.device) -> float:
    """Return the seconds that all work of a fake GPU so far should take."""
    fake = _find_fake()
    assert fake is not None
    return fake.observer.read_clock(device)


def note_shared_memory(device: torch.device, size: int) -> None:
    """Trace memory that is taken beside torch's allocator, for GPUs to write into each other's memory."""
    if (fake := _find_fake()) is not None:
        fake.observer.on_shared_memory(device, size)


def note_sent(device: torch.device, kind: str, size: int, devices: int = 2) -> None:
    """Trace data that leave a GPU; on real GPUs do nothing."""
    if (fake := _find_fake()) is not None and is_gpu(device):
        fake.observer.on_sent(device, kind, size, devices)


def resize_memory(tensor: Tensor, size: int) -> None:
    """Give a tensor's memory back (0 bytes), or take it again; the tensor stays, and what shares its memory."""
    tensor.untyped_storage().resize_(size)
    if (fake := _find_fake()) is not None:
        fake.observer.on_resized(tensor)


def note_used(tensor: Tensor, stream: int) -> None:
    """Trace that a stream of this number uses a tensor that another one made."""
    if (fake := _find_fake()) is not None:
        fake.observer.on_used(tensor, stream)


def note_ordered(device: torch.device, stream: int, event: int, *, waits: bool) -> None:
    """Trace that a stream of a fake GPU records an event, or waits for it."""
    if (fake := _find_fake()) is not None:
        fake.observer.on_ordered(device, stream, event, waits)


def note_mark(name: str) -> None:
    """Trace that a part of the step begins: see ``volseg.estimate.trace.Mark``."""
    if (fake := _find_fake()) is not None:
        fake.observer.on_mark(name)


def note_kernel(kernel: NotedKernel) -> None:
    """Trace a kernel of ours."""
    fake = _find_fake()
    assert fake is not None
    fake.observer.on_kernel(kernel)


def is_gpu(device: torch.device) -> bool:
    """Say whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or (
        _fake is not None and device.type == "cpu" and device.index is not None and _find_fake() is not None
    )


def on_gpu(tensor: Tensor) -> bool:
    """Say whether a tensor lies on a GPU, or on a device that stands for one."""
    return tensor.is_cuda if _fake is None else is_gpu(find_device(tensor))


def find_device(tensor: Tensor) -> torch.device:
    """Return where a tensor lies; a fake one is asked for it directly, and not through torch's dispatcher."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def find_kept(usual: dict[Any, Any]) -> dict[Any, Any]:
    """Return where to keep what belongs to devices: the usual place, or one that ends with the fake GPUs."""
    fake = _find_fake()
    return usual if fake is None else fake.kept


def keeping(limit: int | None = None) -> Callable[[Callable[..., Kept]], Callable[..., Kept]]:
    """Keep what a function makes on a device, by its arguments: ``functools.lru_cache``; fake GPUs have their own."""

    def decorate(function: Callable[..., Kept]) -> Callable[..., Kept]:
        usual = lru_cache(limit)(function)

        @wraps(function)
        def find(*arguments: Any) -> Kept:
            fake = _find_fake()
            if fake is None:
                return usual(*arguments)
            key = find, arguments
            if key not in fake.kept:
                fake.kept[key] = function(*arguments)
            found: Kept = fake.kept[key]
            return found

        return find

    return decorate


def find_address(tensor: Tensor) -> int:
    """Return where a tensor begins in memory; 0 where it has no values."""
    return tensor.data_ptr() if has_values(tensor.device) else 0


def find_readable(device: torch.device) -> torch.device:
    """Return where small values are exchanged that the host reads: on a device; on the host where that has none."""
    return device if has_values(device) else torch.device("cpu")


def host_values() -> AbstractContextManager[Any]:
    """Let tensors of the host have values in here also while a step is traced: votes, seeds, random states."""
    return nullcontext() if _find_fake() is None else without_dispatch_modes()


def find_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    fake = _find_fake()
    return torch.cuda.get_device_capability(device) if fake is None else fake.gpu.capability


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 for a CPU."""
    fake = _find_fake()
    if fake is not None and is_gpu(device):
        return fake.gpu.processors
    return _read_processors(device) if device.type == "cuda" else 1


@lru_cache(maxsize=8)  # asked before most launches
def _read_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_free_bytes(device: torch.device) -> int | float:
    """Return the bytes of a GPU that this process can take, with what it has already and nothing uses."""
    fake = _find_fake()
    if fake is not None:
        return fake.gpu.memory
    free, total = torch.cuda.mem_get_info(device)
    allowed = total * torch.cuda.get_per_process_memory_fraction(device)
    held = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - held
    return min(free + cached, allowed - held)


def move_in_place(tensor: Tensor, device: torch.device) -> None:
    """Give a parameter or buffer, which stays what it is, memory on another device."""
    moved = tensor.data.to(device)
    tensor.data = moved
    if isinstance(tensor, FakeTensor) and isinstance(moved, FakeTensor):  # knows its device by itself
        tensor.fake_device = moved.fake_device


# Recordings.


def is_recording(device: torch.device) -> bool:
    """Say whether a CUDA graph is being recorded on a device's current stream."""
    fake = _find_fake()
    if fake is not None and is_gpu(device):
        return bool(fake.recording)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def find_recording() -> str:
    """Return the name of the pool that a fake recording takes its memory from; empty where nothing is recorded."""
    fake = _find_fake()
    return "" if fake is None else fake.recording


@contextmanager
def fake_recording(pool: str) -> Iterator[None]:
    """Trace work of a fake GPU as recorded, with memory from a pool of this name."""
    fake = _find_fake()
    assert fake is not None
    before, fake.recording = fake.recording, pool
    try:
        yield
    finally:
        fake.recording = before


def empty_cache(device: torch.device) -> None:
    """Wait for all GPUs, and give what their allocators keep back to them."""
    if not has_values(device):
        note_mark("empty_cache")
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def release_cache(devices: Iterable[torch.device]) -> None:
    """Give what the allocators keep back to the GPUs, if there are any: ``torch.cuda.empty_cache``."""
    gpus = [device for device in devices if is_gpu(device)]
    if gpus and not has_values():
        note_mark("empty_cache")
    elif gpus:
        torch.cuda.empty_cache()
