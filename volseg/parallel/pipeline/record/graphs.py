"""Graphs of a recorded batch, their streams and memory: CUDA graphs, and their stand-in on hosts.

``HostGraph`` exists so that tests without a GPU exercise everything built on graphs: it records ATen functions and
repeats them into the same memory. It is no faster than running them.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from volseg.device.gpus import find_kept, is_gpu
from volseg.device.graph import make_graph, make_pool
from volseg.device.streams import find_current_stream, make_stream, on_stream, turn_to_stream
from volseg.device.torch_internals import TorchDispatchMode, get_schema

__all__ = ["HostGraph", "Lanes", "StageGraph", "Unrecorded"]


_numbers: dict[str, "itertools.count[int]"] = {}
"""Counter that numbers recordings."""


class StageGraph(Protocol):
    """Work of one device, recorded between ``begin`` and ``end``."""

    def begin(self) -> None:
        """Start recording this thread's work on the device."""

    def end(self) -> None:
        """Stop recording."""

    def replay(self) -> None:
        """Run the recorded work on the device's current stream."""


class Lanes:
    """Make the graphs of a batch, and hold their streams and memory.

    A device has one stream and one memory pool per *lane*. The graphs of a lane must be replayed in the order of
    recording; those of different lanes run concurrently, so that kernels too small for a whole GPU share it.

    Parameters
    ----------
    count
        Number of lanes.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._number = next(find_kept(_numbers).setdefault("lanes", itertools.count()))
        self._pools: dict[tuple[torch.device, int], Any] = {}
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def make_graph(self, device: torch.device, lane: int) -> StageGraph:
        """Return a new graph for ``device``."""
        if not is_gpu(device):
            return HostGraph()
        if (device, lane) not in self._pools:
            self._pools[device, lane] = make_pool(device, f"recording {self._number}, lane {lane}")
        return make_graph(self._get_stream(device, lane), self._pools[device, lane], is_step=False)

    def _get_stream(self, device: torch.device, lane: int) -> torch.cuda.Stream:
        if (device, lane) not in self._streams:
            self._streams[device, lane] = make_stream(device)
        return self._streams[device, lane]

    @contextlib.contextmanager
    def on_streams(self, devices: Iterable[torch.device]) -> Iterator[dict[torch.device, torch.cuda.Stream]]:
        """Work on the streams of lane 0, after the caller's earlier work and before its later work."""
        gpus = [device for device in devices if is_gpu(device)]
        callers = {device: find_current_stream(device) for device in gpus}
        streams = {device: self._get_stream(device, 0) for device in gpus}
        with contextlib.ExitStack() as stack:
            for device, stream in streams.items():
                stream.wait_stream(callers[device])
                stack.enter_context(on_stream(stream))
            yield streams
        for device, caller in callers.items():
            for lane in range(self.count):
                caller.wait_stream(self._get_stream(device, lane))

    def fan_out(self, devices: Iterable[torch.device]) -> None:
        """Make the other lanes wait for the queued work of lane 0."""
        for device in devices:
            for lane in range(1, self.count if is_gpu(device) else 1):
                self._get_stream(device, lane).wait_stream(self._get_stream(device, 0))

    def turn_to(self, lane: int, devices: Iterable[torch.device]) -> None:
        """Work on the streams of ``lane`` from now on, within ``on_streams``."""
        if self.count > 1:
            for device in devices:
                if is_gpu(device):
                    turn_to_stream(self._get_stream(device, lane))


class Unrecorded:
    """Run the work without recording it."""

    def begin(self) -> None:
        """Record nothing."""

    def end(self) -> None:
        """Nothing to finish."""

    def replay(self) -> None:
        """Nothing to repeat."""


class HostGraph(TorchDispatchMode):
    """A list of ATen functions with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def begin(self) -> None:
        """Start recording."""
        self.__enter__()

    def end(self) -> None:
        """Stop recording."""
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
        """Run every function again and copy fresh results into the first ones; views need nothing."""
        for function, _, _, result in self._steps:
            for old, _ in _list_fresh(function, result, result):
                # As on a GPU, where graphs share memory: earlier contents are gone.
                old.fill_(float("nan") if old.is_floating_point() else 0)
        for function, args, kwargs, result in self._steps:
            returns = get_schema(function).returns
            if all(value.alias_info is not None and not value.alias_info.is_write for value in returns) and returns:
                continue
            for old, new in _list_fresh(function, result, function(*args, **kwargs)):
                old.copy_(new)


def _list_fresh(function: Any, first: Any, again: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results for which ``function`` allocated memory, the first ones with others of the same call."""
    returns = get_schema(function).returns
    olds, news = ((value,) if isinstance(value, Tensor) else value for value in (first, again))
    if not isinstance(olds, tuple | list):
        return
    for place, (old, new) in enumerate(zip(olds, news, strict=True)):
        described = returns[place] if len(returns) == len(olds) else returns[0]
        if isinstance(old, Tensor) and described.alias_info is None:
            yield old, new
