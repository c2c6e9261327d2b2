"""Record the kernels that a stage launches, to launch them again as one: CUDA graphs, and their stand-in on hosts.

``HostProgram`` exists so that everything built on programs is exercised by tests without a GPU: it records
ATen functions and repeats them into the same memory. It is no faster than running them.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CudaProgram", "HostProgram", "Program", "Recorder"]


class Program(Protocol):
    """Work of one device, recorded between ``begin`` and ``end``."""

    def begin(self) -> None:
        """Start recording what this thread launches on the device."""

    def end(self) -> None:
        """Stop recording."""

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return memory on ``device`` for a copy of ``tensor``, which a replay makes."""

    def replay(self) -> None:
        """Launch the recorded work on the device's current stream."""


class Recorder:
    """Makes programs; those of one device share a memory pool and must be replayed in the order of recording."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def program(self, device: torch.device) -> Program:
        """Return a new program for ``device``."""
        if device.type != "cuda":
            return HostProgram()
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        return CudaProgram(self._pools[device], self.stream(device))

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which the programs of ``device`` are recorded and replayed."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @property
    def streams(self) -> dict[torch.device, torch.cuda.Stream]:
        """The streams so far."""
        return self._streams


class CudaProgram:
    """A CUDA graph."""

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

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Leave it blank: capturing runs no kernel that could read it."""
        return torch.empty_like(tensor, device=device)

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


class HostProgram(TorchDispatchMode):
    """A list of ATen functions with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._is_paused = False

    def begin(self) -> None:
        """Record from now on."""
        self.__enter__()

    def end(self) -> None:
        """Record no more."""
        self.__exit__(None, None, None)

    def room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Fill it at once, unrecorded: what is recorded here is run as well."""
        self._is_paused = True
        try:
            return tensor.detach().to(device, copy=True)
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self._is_paused:
            self._steps.append((function, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run every function again and put fresh results where the first ones are; views need nothing."""
        for function, args, kwargs, result in self._steps:
            returns = function._schema.returns
            if all(value.alias_info is not None and not value.alias_info.is_write for value in returns) and returns:
                continue
            again = function(*args, **kwargs)
            olds, news = ((value,) if isinstance(value, Tensor) else value for value in (result, again))
            if not isinstance(olds, tuple | list):
                continue
            for place, (old, new) in enumerate(zip(olds, news, strict=True)):
                described = returns[place] if len(returns) == len(olds) else returns[0]
                if isinstance(old, Tensor) and described.alias_info is None:
                    old.copy_(new)
