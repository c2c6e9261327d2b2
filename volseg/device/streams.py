"""Streams of real or fake GPUs; all work of a fake GPU runs in order, so nothing waits.

A fake stream has a number: torch's allocator hands a block only to the stream that the block belongs to.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import get_device_cache, observer


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


@dataclass(eq=False)
class _Streams:
    """Streams of one trace."""

    made: int = 0
    current: dict[torch.device, FakeStream] = field(default_factory=dict)


_NONE: dict[Any, Any] = {}


def _get_streams() -> _Streams | None:
    """Return the streams of the trace that runs in this thread; None on real GPUs."""
    kept = get_device_cache(_NONE)
    if kept is _NONE:
        return None
    if _Streams not in kept:
        kept[_Streams] = _Streams()
    found: _Streams = kept[_Streams]
    return found


def make_stream(device: torch.device) -> Any:
    """Return a new stream of a GPU: ``torch.cuda.Stream``."""
    streams = _get_streams()
    if streams is None:
        return torch.cuda.Stream(device)
    streams.made += 1
    return FakeStream(device, streams.made)


def current_gpu_stream(device: torch.device) -> Any:
    """Return the current stream of a GPU."""
    streams = _get_streams()
    if streams is None:
        return torch.cuda.current_stream(device)
    return streams.current.get(device) or streams.current.setdefault(device, FakeStream(device, 0))


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
    streams = _get_streams()
    assert streams is not None
    before = current_gpu_stream(stream.device)
    streams.current[stream.device] = stream
    try:
        yield
    finally:
        streams.current[stream.device] = before
