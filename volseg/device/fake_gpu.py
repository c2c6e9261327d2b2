"""Fake GPUs with which ``volseg.estimate`` replaces real ones, and copies of networks without values for them.

A step that is only traced runs on fake tensors of the CPU: autograd of a CPU build of torch aborts on fake tensors of
CUDA. While a thread fakes GPUs, ``torch.device("cpu", i)`` stands for GPU i, and ``torch.device("cpu")``, without a
number, is the host. Other threads, which may copy cases to real GPUs meanwhile, see the real GPUs. A `GpuObserver`
receives the events that a trace needs but that torch's operators do not show.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.device.fake_internals import FakeTensor, FakeTensorMode
from volseg.device.torch_internals import without_dispatch_modes
from volseg.errors import FollowError, ParallelError


def copy_without_values(value: Any, mode: FakeTensorMode) -> Any:
    """Return a deep copy of a network, or of any object with tensors, with a mode's fake tensors.

    Raises
    ------
    FollowError
        For tensors that are more than a block of memory: sparse or quantized ones.
    """
    with without_dispatch_modes(), _Emptying(mode):
        return copy.deepcopy(value)


class copying_by_clones(TorchFunctionMode):  # noqa: N801 (a context, as torch names its own)
    """Let ``copy.deepcopy`` in this block use ``clone`` for tensors that torch cannot copy.

    These are fake tensors, and features of the last batch that a network keeps as attributes: they have a history,
    which the copy drops.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or (args[0].is_leaf and not isinstance(args[0], FakeTensor)):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


class _Emptying(TorchFunctionMode):
    """Copy tensors without their values: ``deepcopy`` calls this mode, for parameters through ``clone``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone and not isinstance(args[0], FakeTensor):
            return self._empty(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                empty = self._empty(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty) if is_parameter else empty
                memo[id(tensor)].requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))

    def _empty(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise FollowError(
                "a network on fake tensors needs strided tensors that are not quantized, got a tensor of "
                f"{tensor.layout} and {tensor.dtype}, shape {tuple(tensor.shape)}; use ordinary parameters and "
                "buffers"
            )
        device = tensor.device if isinstance(tensor, FakeTensor) else "cpu"
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class GpuLike:
    """Properties of a kind of GPU that a trace needs."""

    name: str
    """Name in CUDA, or of its vendor."""
    memory: int
    """Bytes that CUDA reports, fewer than the advertised size: the driver and error correction keep some."""
    processors: int
    """Number of multiprocessors."""
    capability: tuple[int, int]
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
    """Receiver of events on fake GPUs outside torch's operators; by default it ignores all events."""

    def on_kernel(self, kernel: NotedKernel) -> None:
        """Receive a kernel of volseg that would run."""

    def on_sent(self, device: torch.device, kind: str, size: int, devices: int = 2) -> None:
        """Receive a transfer from a GPU: its kind (``Sent.kind``), the number of bytes, and the number of GPUs."""

    def on_resized(self, tensor: Tensor) -> None:
        """Receive a tensor whose memory was freed or allocated again."""

    def on_used(self, tensor: Tensor, stream: int) -> None:
        """Receive a tensor that a stream other than its own uses."""

    def on_mark(self, name: str) -> None:
        """Receive the start of a part of the step; see ``volseg.estimate.trace.Mark``."""

    def read_clock(self, device: torch.device) -> float:
        """Return the seconds that all work of a GPU so far should take."""
        raise ParallelError(f"the observer of {device}, a fake GPU, does not compute the time of its work")


@dataclass(eq=False)
class FakeGpus:
    """The GPUs that a thread fakes."""

    gpu: GpuLike
    observer: GpuObserver
    recording: str = ""
    """Name of the memory pool of the traced recording; empty without a recording."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """Objects that belong to the fake GPUs, and end with them."""
    num_streams: int = 0
    """Number of streams besides the default ones."""
    streams: dict[torch.device, Any] = field(default_factory=dict)
    """Current streams."""
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
        raise ParallelError(f"this process already fakes GPUs ({_fake.gpu.name}); leave that block first")
    _fake = FakeGpus(gpu, observer or GpuObserver())
    try:
        yield
    finally:
        _fake = None


def fake_device(index: int) -> torch.device:
    """Return the device that represents the fake GPU of this number."""
    return torch.device("cpu", index)
