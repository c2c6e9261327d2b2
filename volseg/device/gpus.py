"""GPUs of this process: their number, capabilities and free memory, and the device of a tensor.

All code that runs on GPUs uses this module instead of ``is_cuda`` or ``torch.cuda``: the GPUs of a step that
``volseg.estimate`` traces are fake (`fake_gpu`), and the answers are then those of the fake kind of GPU. `streams` has
the functions for streams.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from volseg.device.fake_gpu import GpuObserver, get_fake
from volseg.device.fake_internals import FakeTensor
from volseg.device.torch_internals import without_dispatch_modes

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
    if isinstance(tensor, FakeTensor) and isinstance(moved, FakeTensor):  # knows its device by itself
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
