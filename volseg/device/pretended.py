"""GPUs that are not there: devices without values, which this process takes for GPUs of a given kind.

A step that is only followed (``volseg.forecast.following``) runs on fake tensors of the CPU: autograd of a CPU build of
torch aborts on fake tensors of CUDA. While this process pretends, ``torch.device("cpu", i)`` stands for GPU i, and
``torch.device("cpu")``, without a number, is the host. Whether something lies on a GPU, and what that GPU can do, is
therefore asked for here, and not with ``is_cuda`` and ``torch.cuda``; its streams are asked for in `streams`.

Outside of ``pretending`` all questions have torch's answers, and so they have in other threads, which may copy cases to
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
    "NotedKernel",
    "count_processors",
    "empty_cache",
    "find_address",
    "find_capability",
    "find_device",
    "find_kept",
    "find_pretended",
    "find_readable",
    "find_recording",
    "host_values",
    "is_gpu",
    "is_pretended",
    "is_recording",
    "keeping",
    "move_in_place",
    "name_pretended",
    "note_kernel",
    "note_mark",
    "note_ordered",
    "note_sent",
    "note_shared_memory",
    "note_used",
    "on_gpu",
    "pretend_recording",
    "pretending",
    "read_clock",
    "release_cache",
    "resize_memory",
]


Kept = TypeVar("Kept")


class GpuLike(Protocol):
    """What is asked of a kind of GPU."""

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
    """What it was given by name: what it is compiled for, ``num_warps``."""


@dataclass(eq=False)
class _Pretence:
    gpu: GpuLike
    note: Callable[[NotedKernel], None] | None
    note_shared: Callable[[torch.device, int], None] | None
    note_sent: Callable[[torch.device, str, int, int], None] | None
    note_resized: Callable[[Tensor], None] | None
    note_used: Callable[[Tensor, int], None] | None = None
    note_ordered: Callable[[torch.device, int, int, bool], None] | None = None
    recording: str = ""
    clock: Callable[[torch.device], float] | None = None
    mark: Callable[[str], None] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)
    thread: int = field(default_factory=get_ident)


_pretence: _Pretence | None = None


def _find_pretence() -> _Pretence | None:
    """Return what this thread pretends: to all others the GPUs are what they are."""
    return _pretence if _pretence is None or _pretence.thread == get_ident() else None


@contextmanager
def pretending(
    gpu: GpuLike,
    note: Callable[[NotedKernel], None] | None = None,
    *,
    shared: Callable[[torch.device, int], None] | None = None,
    sent: Callable[[torch.device, str, int, int], None] | None = None,
    resized: Callable[[Tensor], None] | None = None,
    used: Callable[[Tensor, int], None] | None = None,
    ordered: Callable[[torch.device, int, int, bool], None] | None = None,
    clock: Callable[[torch.device], float] | None = None,
    mark: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Take ``name_pretended(i)`` for GPU i of a kind.

    Parameters
    ----------
    gpu
        The kind.
    note
        Is told of each kernel of ours that would run.
    shared
        Is told how many bytes a GPU gives beside torch's allocator, for others to write to.
    sent
        Is told of data that leave a GPU: in which way (``Sent.kind``), how many bytes, among how many GPUs.
    resized
        Is told of a tensor whose memory was given back, or taken again.
    used
        Is told of a tensor that another stream than its own uses, and of that stream's number.
    ordered
        Is told of a stream that records an event, and of one that waits for it: GPU, number of the stream and of the
        event, and whether it waits.
    clock
        Says how many seconds that should take which a GPU was asked for so far.
    mark
        Is told when a recording begins, is run again, or the allocators' caches are emptied.

    Raises
    ------
    ParallelError
        If the process pretends already.
    """
    global _pretence
    if _pretence is not None:
        raise ParallelError(f"this process already pretends to have GPUs ({_pretence.gpu.name}); end that first")
    _pretence = _Pretence(gpu, note, shared, sent, resized, used, ordered, clock=clock, mark=mark)
    try:
        yield
    finally:
        _pretence = None


def name_pretended(index: int) -> torch.device:
    """Return the device that stands for a GPU of this number."""
    return torch.device("cpu", index)


def find_pretended() -> GpuLike | None:
    """Return the kind of GPU that this process pretends to have, None where it does not pretend."""
    pretence = _find_pretence()
    return None if pretence is None else pretence.gpu


def read_clock(device: torch.device) -> float:
    """Return the seconds that what a GPU was asked for so far should take."""
    pretence = _find_pretence()
    if pretence is None or pretence.clock is None:
        raise ParallelError(
            f"nobody knows how long {device}, which only stands for a GPU, takes: pretending(clock=...)"
        )
    return pretence.clock(device)


def note_shared_memory(device: torch.device, size: int) -> None:
    """Put down that so many bytes are taken beside torch's allocator, for GPUs to write into each other's memory."""
    pretence = _find_pretence()
    if pretence is not None and pretence.note_shared is not None:
        pretence.note_shared(device, size)


def note_sent(device: torch.device, kind: str, size: int, devices: int = 2) -> None:
    """Put down that so many bytes leave a GPU; outside of ``pretending`` do nothing."""
    pretence = _find_pretence()
    if pretence is not None and pretence.note_sent is not None and is_gpu(device):
        pretence.note_sent(device, kind, size, devices)


def resize_memory(tensor: Tensor, size: int) -> None:
    """Give a tensor's memory back (0 bytes), or take it again; the tensor stays, and what shares its memory."""
    tensor.untyped_storage().resize_(size)
    pretence = _find_pretence()
    if pretence is not None and pretence.note_resized is not None:
        pretence.note_resized(tensor)


def note_used(tensor: Tensor, stream: int) -> None:
    """Put down that a stream of this number uses a tensor that another one made."""
    pretence = _find_pretence()
    if pretence is not None and pretence.note_used is not None:
        pretence.note_used(tensor, stream)


def note_ordered(device: torch.device, stream: int, event: int, *, waits: bool) -> None:
    """Put down that a stream of a GPU records an event, or waits for it."""
    pretence = _find_pretence()
    if pretence is not None and pretence.note_ordered is not None:
        pretence.note_ordered(device, stream, event, waits)


def note_mark(name: str) -> None:
    """Say that a part of the step begins: see ``volseg.forecast.trace.Mark``."""
    pretence = _find_pretence()
    if pretence is not None and pretence.mark is not None:
        pretence.mark(name)


def note_kernel(kernel: NotedKernel) -> None:
    """Put down that a kernel would run."""
    pretence = _find_pretence()
    assert pretence is not None
    if pretence.note is not None:
        pretence.note(kernel)


def is_gpu(device: torch.device) -> bool:
    """Say whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or (
        _pretence is not None and device.type == "cpu" and device.index is not None and _find_pretence() is not None
    )


def on_gpu(tensor: Tensor) -> bool:
    """Say whether a tensor lies on a GPU, or on a device that stands for one."""
    return tensor.is_cuda if _pretence is None else is_gpu(find_device(tensor))


def find_device(tensor: Tensor) -> torch.device:
    """Return where a tensor lies; one without values is asked for it directly, and not through torch's dispatcher."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def find_kept(usual: dict[Any, Any]) -> dict[Any, Any]:
    """Return where to keep what belongs to devices: the usual place, or one that goes with the pretence."""
    pretence = _find_pretence()
    return usual if pretence is None else pretence.kept


def keeping(limit: int | None = None) -> Callable[[Callable[..., Kept]], Callable[..., Kept]]:
    """Keep what a function makes on a device, by its arguments: ``functools.lru_cache``; a pretence keeps its own."""

    def decorate(function: Callable[..., Kept]) -> Callable[..., Kept]:
        usual = lru_cache(limit)(function)

        @wraps(function)
        def find(*arguments: Any) -> Kept:
            pretence = _find_pretence()
            if pretence is None:
                return usual(*arguments)
            key = find, arguments
            if key not in pretence.kept:
                pretence.kept[key] = function(*arguments)
            found: Kept = pretence.kept[key]
            return found

        return find

    return decorate


def is_pretended(device: torch.device) -> bool:
    """Say whether a device only stands for a GPU, so that what lies on it has no values."""
    return _find_pretence() is not None and is_gpu(device)


def find_address(tensor: Tensor) -> int:
    """Return where a tensor begins in memory; 0 where it has no values."""
    return 0 if is_pretended(tensor.device) else tensor.data_ptr()


def find_readable(device: torch.device) -> torch.device:
    """Return where small values are exchanged that the host reads: on a device; on the host where that has none."""
    return torch.device("cpu") if is_pretended(device) else device


def host_values() -> AbstractContextManager[Any]:
    """Let tensors of the host have values in here also where this process pretends: votes, seeds, random states."""
    return nullcontext() if _find_pretence() is None else without_dispatch_modes()


def find_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    pretence = _find_pretence()
    return torch.cuda.get_device_capability(device) if pretence is None else pretence.gpu.capability


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 for a CPU."""
    pretence = _find_pretence()
    if pretence is not None and is_gpu(device):
        return pretence.gpu.processors
    return _read_processors(device) if device.type == "cuda" else 1


@lru_cache(maxsize=8)  # asked before most launches
def _read_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def move_in_place(tensor: Tensor, device: torch.device) -> None:
    """Give a parameter or buffer, which stays what it is, memory on another device."""
    moved = tensor.data.to(device)
    tensor.data = moved
    if isinstance(tensor, FakeTensor) and isinstance(moved, FakeTensor):  # knows its device by itself
        tensor.fake_device = moved.fake_device


# Recordings.


def is_recording(device: torch.device) -> bool:
    """Say whether a CUDA graph is being recorded on a device's current stream."""
    pretence = _find_pretence()
    if pretence is not None and is_gpu(device):
        return bool(pretence.recording)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def find_recording() -> str:
    """Return the name of the pool that a pretended recording takes its memory from; empty where nothing is recorded."""
    pretence = _find_pretence()
    return "" if pretence is None else pretence.recording


@contextmanager
def pretend_recording(pool: str) -> Iterator[None]:
    """Pretend that what runs is recorded, with memory from a pool of this name."""
    pretence = _find_pretence()
    assert pretence is not None
    before, pretence.recording = pretence.recording, pool
    try:
        yield
    finally:
        pretence.recording = before


def empty_cache(device: torch.device) -> None:
    """Wait for all GPUs, and give what their allocators keep back to them."""
    if is_pretended(device):
        note_mark("empty_cache")
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def release_cache(devices: Iterable[torch.device]) -> None:
    """Give what the allocators keep back to the GPUs, if there are any: ``torch.cuda.empty_cache``."""
    gpus = [device for device in devices if is_gpu(device)]
    if any(map(is_pretended, gpus)):
        note_mark("empty_cache")
    elif gpus:
        torch.cuda.empty_cache()
