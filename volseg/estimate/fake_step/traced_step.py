"""Collect the events of a traced step: blocks of memory, kernels and messages of each GPU, in order.

Autograd accumulates gradients of fake tensors in place, as it does with plain tensors: if a tensor has several uses,
it adds its later gradients to the first in place, if that has no other reference (``can_accumulate_inplace`` [1]_), and
gradients of indexed reads to zeros in place [2]_. It does both for plain tensors only, so a traced step would take more
memory than a real step. A gradient has no other reference if its reference count equals that of a gradient known to
have none, counted at the same place.

References
----------
.. [1] ``torch/csrc/autograd/input_buffer.cpp``
.. [2] ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from volseg.device.fake_gpu import GpuObserver, NotedKernel, copy_without_values, fake_device, get_fake
from volseg.device.fake_internals import FakeTensorMode
from volseg.device.gpus import current_gpu_stream, get_capability, get_tensor_device, is_gpu
from volseg.device.torch_internals import count_references, find_backward_pass, get_storage_key
from volseg.errors import OutOfMemoryError
from volseg.estimate.operator_work import describe_kernel, describe_noted, list_tensors
from volseg.estimate.trace import Allocate, Event, Free, KernelRun, Mark, Sent, StepTrace, Used

ADD = torch.ops.aten.add.Tensor
IN_PLACE: dict[Any, Any] = {
    ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
ENGINE = "_engine_run_backward"
"""The Python function that calls autograd's own operators; a backward in Python calls its operators itself."""
BETWEEN = ("torch._dynamo.", "torch._compile", "volseg.estimate.")
"""Modules on the call stack between an operator's caller and a mode."""


class InPlace:
    """Replaces autograd's operators with their in-place forms, where autograd would use these on plain tensors."""

    def __init__(self) -> None:
        self._alone: tuple[int, ...] | None = None

    def learn(self) -> None:
        """Count the references of a gradient without other holders, in a backward pass over two numbers.

        The pass goes through the same modes as the operators of a step.
        """
        numbers = torch.empty(2, requires_grad=True) * 2
        (numbers.exp() * numbers.sin()).sum().backward()
        assert self._alone is not None

    def replace(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that autograd runs on plain tensors: the in-place form of ``func``, or ``func``."""
        if torch.is_grad_enabled() or not _comes_from_engine():
            return func
        return IN_PLACE[func] if func is not ADD or self._adds_in_place(args) else func

    def _adds_in_place(self, args: tuple[Any, ...]) -> bool:
        if len(args) != 2:
            return False
        if self._alone is None:
            self._alone = count_references(args, 0)
        counts = count_references(args, 0)
        is_alone = all(count <= alone for count, alone in zip(counts, self._alone, strict=True))
        first, second = args
        is_alike = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
        return is_alone and is_alike and _is_dense(first)


def _comes_from_engine() -> bool:
    """Return whether autograd itself called the current operator."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_name == ENGINE


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's memory has exactly one element per value."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()


HOPPER = 9, 0
OF_PRODUCTS = {False: 8_519_680, True: 32 * 2**20}
"""Bytes of cuBLAS' workspace (``aten/src/ATen/cuda/CublasHandlePool.cpp``), by whether the GPU is a Hopper or newer.
Each stream has its own workspace per thread, and a backward pass runs in a thread of autograd."""


class TracedStep(GpuObserver):
    """The events of a step on fake GPUs.

    Attributes
    ----------
    devices
        The fake GPUs, for a strategy or for ``to``. Tensors of the host are on ``torch.device("cpu")``.
    """

    def __init__(
        self, num_gpus: int = 1, time_kernel: Callable[[KernelRun], float] | None = None, limit: int | None = None
    ) -> None:
        self._time_kernel = time_kernel
        self._limit = limit
        self._has_ended = False
        self._is_recorded = False
        self.fault: OutOfMemoryError | None = None
        """Error that stopped the trace: its end raises it again if the body caught it."""
        self._sizes = [0] * num_gpus
        self._seconds = [0.0] * num_gpus
        self.devices = [fake_device(index) for index in range(num_gpus)]
        self.mode = FakeTensorMode(allow_fallback_kernels=False)
        # The keys of its cache lack torch's global switches, and it keeps the memory that ``set_`` receives.
        self.mode.cache_enabled = False
        self.in_place = InPlace()
        self._events: list[list[Event]] = [[] for _ in self.devices]
        self._held: dict[int, tuple[int, int, int, int]] = {}
        """Device, size, block and stream of each storage, by the storage's key."""
        self._blocks = 0
        self._checked: set[int] = set()
        self._multiplied: set[tuple[torch.device, int, bool]] = set()

    def traces(self) -> tuple[StepTrace, ...]:
        """Return the trace of each device so far."""
        return tuple(StepTrace(tuple(events), index) for index, events in enumerate(self._events))

    def mark(self, name: str) -> None:
        """Mark the beginning of a part on all devices; see ``Mark``."""
        # A step that turns out not to be recordable is traced again without a recording, and may need less.
        self._is_recorded = self._is_recorded or name == "record"
        for number in range(len(self._events)):
            self._put(number, Mark(name))

    def on_mark(self, name: str) -> None:
        """Mark the beginning of a part, when a strategy reports it."""
        self.mark(name)

    def copy(self, value: Any) -> Any:
        """Return a fake copy, on the host, of a network or of any value that holds tensors."""
        return copy_without_values(value, self.mode)

    def empty(self, *size: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor, by default on the first device."""
        return torch.empty(size, device=self.devices[0] if device is None else device, dtype=dtype)

    def on_sent(self, device: torch.device, kind: str, size: int, devices: int = 2) -> None:
        """Record data that leave a device."""
        if is_gpu(device):
            self._put(self._number(device), Sent(kind, size, devices, current_gpu_stream(device).number))

    def read_clock(self, device: torch.device) -> float:
        """Return the estimated seconds of a device's kernels so far."""
        if self._time_kernel is None:
            return super().read_clock(device)
        return self._seconds[self._number(device)]

    def on_used(self, tensor: Tensor, stream: int) -> None:
        """Record that a stream works on a tensor of another stream."""
        key = get_storage_key(tensor.untyped_storage())
        if key in self._held:
            number, _, block, own = self._held[key]
            if stream != own:
                self._put(number, Used(block))

    def end(self) -> None:
        """End the trace: Python's frees after the step are not part of the step."""
        self._has_ended = True

    def _put(self, number: int, event: Event) -> None:
        if not self._has_ended:
            self._events[number].append(event)

    def _note_run(self, number: int, run: KernelRun) -> None:
        self._put(number, run)
        if self._time_kernel is not None:
            self._seconds[number] += self._time_kernel(run)

    def note_storage(self, tensor: Tensor) -> None:
        """Record the memory of a tensor, if it is new and on a GPU."""
        device = get_tensor_device(tensor)
        if not is_gpu(device):
            return
        storage = tensor.untyped_storage()
        key = get_storage_key(storage)
        if key in self._held:
            return
        self._take(key, self._number(device), storage.nbytes(), device)
        weakref.finalize(storage, self._give_back, key).atexit = False

    def on_resized(self, tensor: Tensor) -> None:
        """Record that a tensor's memory was freed, or allocated again."""
        storage = tensor.untyped_storage()
        key = get_storage_key(storage)
        if key in self._held:
            number = self._give_back(key)
            self._take(key, number, storage.nbytes(), tensor.device)

    def _take(self, key: int, number: int, size: int, device: torch.device) -> None:
        self._blocks += 1
        stream = current_gpu_stream(device).number
        self._held[key] = number, size, self._blocks, stream
        self._sizes[number] += size
        if self._limit is not None and self._sizes[number] > self._limit and self._is_in_order():
            self.fault = OutOfMemoryError(
                f"the tensors of one GPU alone would be more than {self._limit / 2**30:,.1f} GiB; take smaller patches "
                "or volumes, or a smaller batch"
            )
            raise self.fault
        if size:
            self._put(number, Allocate(self._blocks, size, stream, _find_pool()))

    def _is_in_order(self) -> bool:
        """Return whether tensors would be alive together on real GPUs too: in backward, each device has a thread."""
        return not self._is_recorded and (len(self.devices) == 1 or find_backward_pass() == -1)

    def _give_back(self, key: int) -> int:
        self._checked.discard(key)
        number, size, block, _ = self._held.pop(key)
        self._sizes[number] -= size
        if size:
            self._put(number, Free(block))
        return number

    def note_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator of torch on the device of its result."""
        tensors = list_tensors((args, kwargs))
        home = find_gpu(list_tensors(out)) or find_gpu(tensors)
        if home is not None:
            run = describe_kernel(function, args, kwargs, tensors, out, current_gpu_stream(home).number)
            if run is not None:
                self._note_run(self._number(home), run)

    def note_product(self, device: torch.device) -> None:
        """Record the workspace that the first matrix product of a thread and a stream allocates for good."""
        if not is_gpu(device):
            return
        stream, in_backward = current_gpu_stream(device).number, find_backward_pass() != -1
        if (device, stream, in_backward) not in self._multiplied:
            self._multiplied.add((device, stream, in_backward))
            self._blocks += 1
            size = OF_PRODUCTS[get_capability(device) >= HOPPER]
            self._put(self._number(device), Allocate(self._blocks, size, stream, _find_pool()))

    def note_checked(self, found: Tensor) -> None:
        """Record that a tensor holds the check for finite gradients, which the loss scaling reads."""
        self._checked.add(get_storage_key(found.untyped_storage()))

    def is_checked(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds the check for finite gradients; in a traced step all gradients are finite."""
        return get_storage_key(tensor.untyped_storage()) in self._checked

    def on_kernel(self, kernel: NotedKernel) -> None:
        """Record one of volseg's kernels."""
        home = kernel.tensors[0].device
        stream = current_gpu_stream(home).number
        self._note_run(self._number(home), describe_noted(kernel, stream))

    def _number(self, device: torch.device) -> int:
        assert device.index is not None
        return device.index


def _find_pool() -> str:
    """Return the name of the pool of the current recording; empty if nothing is recorded."""
    fake = get_fake()
    return "" if fake is None else fake.recording


def find_gpu(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the first GPU among the devices of tensors."""
    return next((device for device in map(get_tensor_device, tensors) if is_gpu(device)), None)
