"""GPUs of this process: their number, capabilities, memory and streams, and the device of a tensor.

All code that runs on GPUs uses this module instead of ``is_cuda`` or ``torch.cuda``: the GPUs of a step that
``volseg.estimate`` traces are fake (`fake_gpu`), and the answers are then those of the fake kind of GPU. All
work of a fake GPU runs in order, so nothing waits. A fake stream has a number: torch's allocator hands a block only to
the stream that the block belongs to.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from volseg.device.fake_gpu import GpuObserver, get_fake
from volseg.device.fake_internals import FakeTensor
from volseg.device.torch_internals import PLAIN_TENSORS, count_references, without_dispatch_modes

Kept = TypeVar("Kept")

NOBODY = GpuObserver()
"""Observer of real GPUs, which ignores everything."""


def count_gpus() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def uses_gpus() -> bool:
    """Return whether this process has initialised CUDA; a query of CUDA itself would take GPU memory."""
    return torch.cuda.is_initialized()


def observer() -> GpuObserver:
    """Return the observer of events outside torch's operators: a trace; on real GPUs a stub."""
    fake = get_fake()
    return NOBODY if fake is None else fake.observer


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, real or fake."""
    return device.type == "cuda" or (device.type == "cpu" and device.index is not None and get_fake() is not None)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, real or fake."""
    return tensor.is_cuda if get_fake() is None else is_gpu(get_tensor_device(tensor))


def has_values(device: torch.device | None = None) -> bool:
    """Return whether tensors have values: not on fake GPUs or, without a device, in any trace."""
    return get_fake() is None or (device is not None and not is_gpu(device))


def resize_memory(tensor: Tensor, size: int) -> None:
    """Free a tensor's memory (0 bytes), or allocate it again; the tensor and tensors that share its memory stay."""
    tensor.untyped_storage().resize_(size)
    observer().on_resized(tensor)


def get_tensor_device(tensor: Tensor) -> torch.device:
    """Return a tensor's device; a fake tensor's is read directly, not through torch's dispatcher."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def get_device_cache(usual: dict[Any, Any]) -> dict[Any, Any]:
    """Return where to keep objects of devices: the usual place, or one that ends with the fake GPUs."""
    fake = get_fake()
    return usual if fake is None else fake.kept


def keeping(limit: int | None = None) -> Callable[[Callable[..., Kept]], Callable[..., Kept]]:
    """Cache a function's results on a device by its arguments, like ``functools.lru_cache``; separate for fake GPUs."""

    def decorate(function: Callable[..., Kept]) -> Callable[..., Kept]:
        usual = lru_cache(limit)(function)

        @wraps(function)
        def find(*arguments: Any) -> Kept:
            fake = get_fake()
            if fake is None:
                return usual(*arguments)
            key = find, arguments
            if key not in fake.kept:
                fake.kept[key] = function(*arguments)
            found: Kept = fake.kept[key]
            return found

        return find

    return decorate


def get_address(tensor: Tensor) -> int:
    """Return a tensor's address; 0 for a fake tensor."""
    return tensor.data_ptr() if has_values(tensor.device) else 0


def get_host_readable_device(device: torch.device) -> torch.device:
    """Return the device for exchanging small values that the host reads: the device itself, or the host in a trace."""
    return device if has_values(device) else torch.device("cpu")


def host_values() -> AbstractContextManager[Any]:
    """Give tensors of the host values in this block even in a trace: votes, seeds, random states."""
    return nullcontext() if get_fake() is None else without_dispatch_modes()


def get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    fake = get_fake()
    return torch.cuda.get_device_capability(device) if fake is None else fake.gpu.capability


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, 1 for a CPU."""
    fake = get_fake()
    if fake is not None and is_gpu(device):
        return fake.gpu.processors
    return _read_processors(device) if device.type == "cuda" else 1


@lru_cache(maxsize=8)  # asked before most launches
def _read_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_free_bytes(device: torch.device) -> int | float:
    """Return the bytes of a GPU that this process can allocate, including cached memory."""
    fake = get_fake()
    if fake is not None:
        return fake.gpu.memory
    free, total = torch.cuda.mem_get_info(device)
    allowed = total * torch.cuda.get_per_process_memory_fraction(device)
    held = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - held
    return min(free + cached, allowed - held)


def move_in_place(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer to another device; the tensor object stays the same."""
    moved = tensor.data.to(device)
    tensor.data = moved
    if isinstance(tensor, FakeTensor) and isinstance(moved, FakeTensor):  # its device is an attribute of its own
        tensor.fake_device = moved.fake_device


def is_recording(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on a device's current stream."""
    fake = get_fake()
    if fake is not None and is_gpu(device):
        return bool(fake.recording)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def fake_recording(pool: str) -> Iterator[None]:
    """Trace work of a fake GPU as recorded, with memory from a pool of this name."""
    fake = get_fake()
    assert fake is not None
    before, fake.recording = fake.recording, pool
    try:
        yield
    finally:
        fake.recording = before


def empty_cache(device: torch.device) -> None:
    """Wait for all GPUs, and return their allocators' cached memory."""
    if not has_values(device):
        observer().on_mark("empty_cache")
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def release_cache(devices: Iterable[torch.device]) -> None:
    """Return the allocators' cached memory to the GPUs, if there are any: ``torch.cuda.empty_cache``."""
    gpus = [device for device in devices if is_gpu(device)]
    if gpus and not has_values():
        observer().on_mark("empty_cache")
    elif gpus:
        torch.cuda.empty_cache()


@dataclass(eq=False)
class FakeStream:
    """A stream of a fake GPU; memory allocated on it is traced with its number."""

    device: torch.device
    number: int

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self) -> object:
        """Return a point in its work, for which nothing has to wait."""
        return object()


def make_stream(device: torch.device) -> Any:
    """Return a new stream of a GPU: ``torch.cuda.Stream``."""
    fake = get_fake()
    if fake is None:
        return torch.cuda.Stream(device)
    fake.num_streams += 1
    return FakeStream(device, fake.num_streams)


def current_gpu_stream(device: torch.device) -> Any:
    """Return the current stream of a GPU."""
    fake = get_fake()
    if fake is None:
        return torch.cuda.current_stream(device)
    return fake.streams.get(device) or fake.streams.setdefault(device, FakeStream(device, 0))


def note_use(tensor: Tensor, stream: Any) -> None:
    """Keep a tensor's memory from reuse until a stream has reached this point: ``Tensor.record_stream``."""
    if isinstance(stream, FakeStream):
        observer().on_used(tensor, stream.number)
    else:
        tensor.record_stream(stream)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Queue the work of a block on a stream: ``torch.cuda.stream``."""
    return _on_fake_stream(stream) if isinstance(stream, FakeStream) else torch.cuda.stream(stream)


@contextmanager
def _on_fake_stream(stream: FakeStream) -> Iterator[None]:
    fake = get_fake()
    assert fake is not None
    before = current_gpu_stream(stream.device)
    fake.streams[stream.device] = stream
    try:
        yield
    finally:
        fake.streams[stream.device] = before


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


def move_together(tensors: Iterable[Tensor]) -> None:
    """Move tensors of one GPU to new memory through host memory, and release the freed segments.

    The tensors stay the same objects. Tensors that share memory with others (a view, a slice of a bucket) stay where
    they are, and so do tensors that are on no GPU.

    Parameters
    ----------
    tensors
        Tensors; duplicates are allowed.
    """
    own = count_references((torch.empty(1),), 0)[1]
    found = {id(tensor): tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS and on_gpu(tensor)}
    moved = [tensor for tensor in found.values() if _has_memory_of_its_own(tensor, own)]
    if not moved:
        return
    devices = [get_tensor_device(tensor) for tensor in moved]
    on_host = [tensor.detach().to("cpu", copy=True) for tensor in moved]
    for tensor, copy in zip(moved, on_host, strict=True):
        tensor.data = copy  # values exist in one place at any time
    empty_cache(devices[0])
    for tensor, device in zip(moved, devices, strict=True):
        tensor.data = tensor.data.to(device)


def _has_memory_of_its_own(tensor: Tensor, own: int) -> bool:
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == bytes_ > 0 and count_references((tensor,), 0)[1] == own
