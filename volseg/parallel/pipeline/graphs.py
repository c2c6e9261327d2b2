"""Record the work of several devices as one graph, and refuse what a replay would not repeat.

A recording is a CUDA graph, or its stand-in on hosts.

``HostGraph`` exists so that tests without a GPU exercise everything built on graphs: it records ATen functions and
repeats them into the same memory. It is no faster than running them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from volseg.device.gpus import (
    current_gpu_stream,
    get_device_cache,
    has_values,
    is_gpu,
    make_stream,
    on_stream,
    release_cache,
)
from volseg.device.graph import make_graph, make_pool, undisturbed
from volseg.device.torch_internals import TorchDispatchMode, find_saved_tensors_hooks, find_transform, get_storage_key
from volseg.errors import ParallelError
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.observer import DIFFERENTIATE
from volseg.parallel.pipeline.placement import ADDITIONS, BatchContext, PlacedRun, Placement
from volseg.parallel.pipeline.statistics import WholeBatchStatistics
from volseg.parallel.pipeline.transfer import list_copy_streams
from volseg.parallel.state.module import read_version

T = TypeVar("T")

VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of functions whose result Python reads, or whose shape depends on values."""

_numbers: dict[str, "itertools.count[int]"] = {}
"""Counter that numbers recordings."""


class RecordRefusedError(ParallelError):
    """A forward does something that a recording would not repeat."""


class Lanes:
    """Streams and memory of the graphs of one batch.

    A device has one stream per *lane*. Micro-batches alternate among the lanes, so that kernels too small for a whole
    GPU share it. All graphs are started on one stream, and must be replayed in the order of recording.

    Parameters
    ----------
    devices
        All devices that a recorded function uses.
    count
        Number of lanes; hosts have one.
    """

    def __init__(self, devices: Iterable[torch.device], count: int) -> None:
        every = sorted(set(devices), key=str)
        self.first = every[0]
        """Device that starts the graphs."""
        self._gpus = [device for device in every if is_gpu(device)]
        if self._gpus and len(self._gpus) < len(every):
            raise RecordRefusedError("a CUDA graph cannot contain work of a CPU")
        self.count = count if self._gpus else 1
        if not self._gpus:
            return
        self._start = make_stream(self._gpus[0])
        self._streams = {(device, lane): make_stream(device) for device in self._gpus for lane in range(self.count)}
        number = next(get_device_cache(_numbers).setdefault("lanes", itertools.count()))
        self._pool = make_pool(self._gpus[0], f"recording {number}")
        # ``torch.cuda.CUDAGraph`` has memory on one device only.
        self._others = {device: _make_memory(device) for device in self._gpus[1:] if has_values(device)}

    @contextlib.contextmanager
    def turn_to(self, lane: int) -> Iterator[None]:
        """Work on the streams of ``lane`` in this block."""
        with contextlib.ExitStack() as stack:
            for device in self._gpus:
                stack.enter_context(on_stream(self._streams[device, lane]))
            if self._gpus and has_values(self._gpus[0]):
                stack.enter_context(torch.cuda.device(self._gpus[0]))
            yield

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record the work that ``work`` queues on the devices, from this thread only; return its replay and its result.

        ``work`` chooses lanes by ``turn_to``, and runs under ``RefusedOperations``. On GPUs no kernel runs.
        """
        if not self._gpus:
            graph = HostGraph()
            with undisturbed(), graph, RefusedOperations(self.first):
                return graph.replay, work()
        own = make_graph(self._start, self._pool, is_step=False)
        joined = [*self._streams.values(), *list_copy_streams(self._gpus)]
        with undisturbed(), contextlib.ExitStack() as stack:
            release_cache(self._gpus)  # a recording has its own memory, and needs what eager batches have cached
            own.begin()
            try:
                for device, memory in self._others.items():
                    stack.enter_context(torch.cuda.use_mem_pool(memory, device))
                for stream in joined:
                    stream.wait_stream(self._start)
                # Backward must not run in autograd's own threads: their allocations would not be the recording's.
                several_threads = torch.autograd.set_multithreading_enabled
                with self.turn_to(0), RefusedOperations(self.first), several_threads(False):
                    result = work()
                for stream in joined:
                    self._start.wait_stream(stream)
            except BaseException:
                # The first failure tells more than those of the broken graph.
                for stream in joined:
                    with contextlib.suppress(RuntimeError):
                        self._start.wait_stream(stream)
                with contextlib.suppress(RuntimeError):
                    own.end()
                raise
            own.end()
        return partial(_replay, own, self._start, self._gpus), result


def _replay(graph: Any, start: Any, devices: Iterable[torch.device]) -> None:
    """Run a graph after the callers' earlier work on every device, and before their later work."""
    callers = [current_gpu_stream(device) for device in devices]
    for caller in callers:
        start.wait_stream(caller)
    with on_stream(start):
        graph.replay()
    for caller in callers:
        caller.wait_stream(start)


def _make_memory(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


class HostGraph(TorchDispatchMode):
    """A list of ATen functions with their arguments and new tensors, recorded while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = set(map(_find_memory, runs.iterate_tensors((args, kwargs))))
        new = [None if _find_memory(tensor) in given else tensor for tensor in runs.iterate_tensors(result)]
        self._steps.append((function, args, kwargs, new))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run every function again, and copy its new tensors to the first ones."""
        for old in (tensor for *_, new in self._steps for tensor in new if tensor is not None):
            # As on a GPU, where graphs share memory: earlier contents are gone.
            old.fill_(float("nan") if old.is_floating_point() else 0)
        for function, args, kwargs, new in self._steps:
            again = runs.iterate_tensors(function(*args, **kwargs))
            for first, other in zip(new, again, strict=True):
                if first is not None:
                    first.copy_(other)


class RefusedOperations(TorchDispatchMode):
    """Refuse functions whose result Python reads, or whose shape depends on values: a replay runs no Python.

    Each of them would invalidate a CUDA capture. Random numbers are refused on other GPUs than the one that starts the
    graph: a replay writes the seeds of each GPU on that GPU's current stream, for which the graph does not wait.

    Parameters
    ----------
    first
        Device that starts the graph.
    """

    def __init__(self, first: torch.device) -> None:
        super().__init__()
        self._first = first

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Indexing has a tag only because of masks.
        is_index = function is torch.ops.aten.index.Tensor
        by_mask = is_index and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if by_mask or (not is_index and VALUES.intersection(function.tags)):
            raise RecordRefusedError(f"the network reads values of a tensor ({function}), which a replay would not")
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags and any(
            is_gpu(tensor.device) and tensor.device != self._first for tensor in runs.iterate_tensors(result)
        ):
            raise RecordRefusedError(f"random numbers are drawn ({function}) on another GPU than {self._first}")
        return result


class RecordedRun(PlacedRun):
    """A placed run that refuses derivatives, hooks of saved tensors, and changes of tensors that outlive it.

    Parameters
    ----------
    placement, statistics, context
        As for any placed run.
    inputs
        The tensors in the arguments.
    """

    def __init__(
        self, placement: Placement, statistics: WholeBatchStatistics, context: BatchContext, inputs: Iterable[Tensor]
    ) -> None:
        super().__init__(placement, statistics, context)
        # By memory instead of identity: ``.data`` is another tensor, with a version of its own.
        self._memory = set(map(_find_memory, (*placement.states, *inputs)))

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in DIFFERENTIATE or find_transform() is not None:
            raise RecordRefusedError("forward differentiates or maps functions (torch.autograd, torch.func)")
        if find_saved_tensors_hooks(False) is not None:
            raise RecordRefusedError("forward recomputes or offloads activations (hooks for saved tensors)")
        plain = [runs.unwrap(tensor) for tensor in runs.iterate_tensors((args, kwargs or {}))]
        counters = self.placement.counters
        if getattr(function, "__name__", "") not in ADDITIONS and any(id(tensor) in counters for tensor in plain):
            raise RecordRefusedError("forward reads the number of batches so far, which a replay increases at its end")
        read = [(tensor, read_version(tensor)) for tensor in plain]
        result = super().__torch_function__(function, types, args, kwargs)
        # Micro-batches on two streams would change it concurrently.
        if any(_find_memory(tensor) in self._memory for tensor in runs.list_changed_tensors(read)):
            name = getattr(function, "__name__", function)
            raise RecordRefusedError(f"forward changes its own state or an argument in place ({name})")
        return result


def _find_memory(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same memory."""
    return get_storage_key(tensor.untyped_storage()) if tensor.layout == torch.strided else id(tensor)
