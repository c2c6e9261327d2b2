"""Record the kernels that a stage launches, to launch them again as one: CUDA graphs, and their stand-in on hosts.

``HostProgram`` exists so that everything built on programs is exercised by tests without a GPU: it records
ATen functions and repeats them into the same memory. It is no faster than running them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CudaProgram", "HostProgram", "Program", "Recorder", "Unrecorded"]


class Program(Protocol):
    """Work of one device, recorded between ``begin`` and ``end``."""

    def begin(self) -> None:
        """Start recording what this thread launches on the device."""

    def end(self) -> None:
        """Stop recording."""

    def replay(self) -> None:
        """Launch the recorded work on the device's current stream."""


class Recorder:
    """Makes programs, and holds their streams.

    A device has one stream and one memory pool per *lane*. The programs of a lane must be replayed in the order of
    recording; those of different lanes run beside one another, so that kernels too small for a whole GPU share it.

    Parameters
    ----------
    lanes
        How many.
    """

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes
        self._pools: dict[tuple[torch.device, int], Any] = {}
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def program(self, device: torch.device, lane: int) -> Program:
        """Return a new program for ``device``."""
        if device.type != "cuda":
            return HostProgram()
        if (device, lane) not in self._pools:
            self._pools[device, lane] = torch.cuda.graph_pool_handle()
        return CudaProgram(self._pools[device, lane], self._stream(device, lane))

    def _stream(self, device: torch.device, lane: int) -> torch.cuda.Stream:
        if (device, lane) not in self._streams:
            self._streams[device, lane] = torch.cuda.Stream(device)
        return self._streams[device, lane]

    @contextlib.contextmanager
    def on_streams(self, devices: Iterable[torch.device]) -> Iterator[dict[torch.device, torch.cuda.Stream]]:
        """Work on the streams of lane 0, after what the caller has queued and before what it will queue."""
        gpus = [device for device in devices if device.type == "cuda"]
        callers = {device: torch.cuda.current_stream(device) for device in gpus}
        streams = {device: self._stream(device, 0) for device in gpus}
        with contextlib.ExitStack() as stack:
            for device, stream in streams.items():
                stream.wait_stream(callers[device])
                stack.enter_context(torch.cuda.stream(stream))
            yield streams
        for device, caller in callers.items():
            for lane in range(self.lanes):
                caller.wait_stream(self._stream(device, lane))

    def fan_out(self, devices: Iterable[torch.device]) -> None:
        """Let the other lanes begin after what lane 0 has queued."""
        for device in devices:
            for lane in range(1, self.lanes if device.type == "cuda" else 1):
                self._stream(device, lane).wait_stream(self._stream(device, 0))

    def turn_to(self, lane: int, devices: Iterable[torch.device]) -> None:
        """Work on the streams of ``lane`` from now on, within ``on_streams``."""
        if self.lanes > 1:
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.set_stream(self._stream(device, lane))


class Unrecorded:
    """Runs its work and forgets it."""

    def begin(self) -> None:
        """Record nothing."""

    def end(self) -> None:
        """Nothing to finish."""

    def replay(self) -> None:
        """Nothing to launch."""


class CudaProgram:
    """A CUDA graph.

    Memory allocated while one is recorded is its own from its first kernel to its last use in a recording, and no
    longer: before, it may be another allocation's. So nothing that is filled before a program runs may be
    allocated while it is recorded.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()
        self._before: tuple[int, torch.cuda.Stream] | None = None

    def begin(self) -> None:
        """Capture on the program's own stream: ``torch.cuda.graph``'s default one belongs to one device only."""
        self._before = torch.cuda.current_device(), torch.cuda.current_stream(self._stream.device)
        torch.cuda.set_stream(self._stream)
        # thread_local: backward is recorded from autograd's threads, and loaders' threads may allocate meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """Finish the capture."""
        try:
            self._graph.capture_end()
        finally:
            assert self._before is not None
            torch.cuda.set_stream(self._before[1])
            torch.cuda.set_device(self._before[0])

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class HostProgram(TorchDispatchMode):
    """A list of ATen functions with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def begin(self) -> None:
        """Record from now on."""
        self.__enter__()

    def end(self) -> None:
        """Record no more."""
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._steps.append((function, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run every function again and put fresh results where the first ones are; views need nothing."""
        for function, _, _, result in self._steps:
            for old, _ in _fresh(function, result, result):
                # As on a GPU, where programs share memory: what was here is gone.
                old.fill_(float("nan") if old.is_floating_point() else 0)
        for function, args, kwargs, result in self._steps:
            returns = function._schema.returns
            if all(value.alias_info is not None and not value.alias_info.is_write for value in returns) and returns:
                continue
            for old, new in _fresh(function, result, function(*args, **kwargs)):
                old.copy_(new)


def _fresh(function: Any, first: Any, again: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results for which ``function`` allocated memory, the first ones and others of the same call."""
    returns = function._schema.returns
    olds, news = ((value,) if isinstance(value, Tensor) else value for value in (first, again))
    if not isinstance(olds, tuple | list):
        return
    for place, (old, new) in enumerate(zip(olds, news, strict=True)):
        described = returns[place] if len(returns) == len(olds) else returns[0]
        if isinstance(old, Tensor) and described.alias_info is None:
            yield old, new
