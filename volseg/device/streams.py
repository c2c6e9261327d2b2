"""Streams and events of GPUs, and of those that only stand for GPUs: all that is pretended runs in order.

What would wait for another stream has nothing to wait for there. What is noted is the number of the stream that work is
put on, as torch's allocator hands a block only to the stream it is of, and which stream waits for which.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from volseg.device.pretended import find_kept, note_ordered, note_used
from volseg.errors import ParallelError

__all__ = [
    "PretendedEvent",
    "PretendedStream",
    "find_current_stream",
    "make_event",
    "make_stream",
    "note_use",
    "on_stream",
    "turn_to_stream",
]


@dataclass(eq=False)
class PretendedEvent:
    """A point in the work of a stream: there is nothing to wait for, but who waits for what is told."""

    number: int = 0
    """Of all that were recorded; 0 before."""

    def record(self, stream: Any = None) -> None:
        """Tell that it is recorded."""
        if isinstance(stream, PretendedStream):
            stream.record_event(self)

    def wait(self, stream: Any = None) -> None:
        """Tell that a stream waits."""
        if isinstance(stream, PretendedStream):
            stream.wait_event(self)

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Refuse: nothing that is pretended takes time."""
        raise ParallelError(f"a step that is followed without a GPU takes no time to measure, up to {end}")


@dataclass(eq=False)
class PretendedStream:
    """A stream of a GPU that is not there; memory that is taken on it is noted with its number."""

    device: torch.device
    number: int

    def wait_stream(self, stream: Any) -> None:
        """Tell that it waits for what another one has been given."""
        if isinstance(stream, PretendedStream):
            self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        """Tell that it waits; all that is pretended runs in order."""
        if event.number:
            note_ordered(self.device, self.number, event.number, waits=True)

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """Return the event."""
        recorded = PretendedEvent() if event is None else event
        streams = _find_streams()
        if streams is not None:
            streams.events += 1
            recorded.number = streams.events
            note_ordered(self.device, self.number, recorded.number, waits=False)
        return recorded

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True


@dataclass(eq=False)
class _Streams:
    """Those of one pretence."""

    made: int = 0
    events: int = 0
    current: dict[torch.device, PretendedStream] = field(default_factory=dict)


_NONE: dict[Any, Any] = {}


def _find_streams() -> _Streams | None:
    """Return the streams of what this thread pretends; None where it does not pretend."""
    kept = find_kept(_NONE)
    if kept is _NONE:
        return None
    if _Streams not in kept:
        kept[_Streams] = _Streams()
    found: _Streams = kept[_Streams]
    return found


def make_stream(device: torch.device, **options: Any) -> Any:
    """Return a new stream of a GPU: ``torch.cuda.Stream``."""
    streams = _find_streams()
    if streams is None:
        return torch.cuda.Stream(device, **options)
    streams.made += 1
    return PretendedStream(device, streams.made)


def make_event(**options: Any) -> Any:
    """Return a new event: ``torch.cuda.Event``."""
    return torch.cuda.Event(**options) if _find_streams() is None else PretendedEvent()


def find_current_stream(device: torch.device) -> Any:
    """Return the stream of a GPU on which work is put now."""
    streams = _find_streams()
    if streams is None:
        return torch.cuda.current_stream(device)
    return streams.current.get(device) or streams.current.setdefault(device, PretendedStream(device, 0))


def note_use(tensor: Tensor, stream: Any) -> None:
    """Let a tensor's memory not be used again before a stream has come here: ``Tensor.record_stream``."""
    if not isinstance(stream, PretendedStream):
        tensor.record_stream(stream)
        return
    note_used(tensor, stream.number)


def turn_to_stream(stream: Any) -> None:
    """Put the work that follows on a stream: ``torch.cuda.set_stream``."""
    streams = _find_streams()
    if not isinstance(stream, PretendedStream) or streams is None:
        torch.cuda.set_stream(stream)
    else:
        streams.current[stream.device] = stream


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Put the work of a block on a stream: ``torch.cuda.stream``."""
    return _pretend_stream(stream) if isinstance(stream, PretendedStream) else torch.cuda.stream(stream)


@contextmanager
def _pretend_stream(stream: PretendedStream) -> Iterator[None]:
    streams = _find_streams()
    assert streams is not None
    before = find_current_stream(stream.device)
    streams.current[stream.device] = stream
    try:
        yield
    finally:
        streams.current[stream.device] = before
