"""Trace of one ``forward`` as a flat list of events, and the runs of module calls that must stay together.

This module is pure: it reads the events of an ``Observer``. A pipeline may be cut only just before the call of a *leaf*
(a module that calls no other module), and not everywhere:

* A tensor that is changed in place must not have been copied to another device before, or the original would
  keep its old value. No cut falls between the creation of such memory and its last change.
* ``torch.utils.checkpoint`` runs a function again during backward, from its original inputs. The module whose
  ``forward`` calls it stays whole, so those inputs are on one device. If the outermost network itself
  checkpoints its children, each child stays whole; and no cut falls just before one that draws random numbers,
  because checkpoint restores the generators of its inputs' devices only.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Call:
    """The ``index``-th call (from 0) of the module at ``path`` within one forward."""

    path: str
    index: int


@dataclass(frozen=True, slots=True)
class Enter:
    """A module call starts."""

    call: Call
    uses: tuple[int, ...] = ()
    """Operations whose results are its arguments."""
    guard: int = 0
    """Differs from the caller's if ``checkpoint`` is in between."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The innermost module call ends."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One torch function."""

    number: int
    name: str = ""
    uses: tuple[int, ...] = ()
    """Operations whose results it reads."""
    states: tuple[str, ...] = ()
    """Parameters and buffers it reads, by name."""
    changed_since: int | None = None
    """The operation that made (or first read) the oldest memory that this one changes in place."""
    is_random: bool = False
    """Whether it drew from a generator."""
    guard: int = 0


Event = Enter | Leave | Operation


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one forward and the operations that made its outputs."""

    events: tuple[Event, ...]
    outputs: tuple[int, ...] = ()
    aliased: frozenset[str] = frozenset()
    """Parameters and buffers that forward reaches under another name, such as ``.data``: changing that name does not
    increase the version, so copies of them are valid only once."""
    written: frozenset[str] = frozenset()
    """Parameters and buffers that forward changes."""
    changes_arguments: bool = False
    """Whether forward changes its arguments in place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls between two places where the network may be cut."""

    calls: tuple[Call, ...]
    operations: range
    states: tuple[str, ...] = ()
    """Parameters and buffers read here and in no earlier segment."""
    sends: tuple[int, ...] = ()
    """Operations whose results later segments, or the caller, use."""


@dataclass(slots=True)
class _Frame:
    """A module call during reconstruction."""

    call: Call
    position: int
    guard: int
    parent: "_Frame | None"
    first_operation: int
    uses: tuple[int, ...] = ()
    has_calls: bool = False
    is_whole: bool = False
    is_rerun_at_root: bool = False
    operations: list[Operation] = field(default_factory=list)

    def within_whole(self) -> bool:
        """Whether a caller is kept whole."""
        return self.parent is not None and (self.parent.is_whole or self.parent.within_whole())


def _rebuild_frames(trace: Trace) -> list[_Frame]:
    """Rebuild the call tree, in the order of entering; the first frame is the network itself."""
    frames: list[_Frame] = []
    inner: _Frame | None = None
    operations = 0
    for position, event in enumerate(trace.events):
        if isinstance(event, Enter):
            frame = _Frame(event.call, position, event.guard, inner, operations, event.uses)
            if inner is not None:
                inner.has_calls = True
                if event.guard != inner.guard:
                    _keep_whole(inner, frame)
            frames.append(frame)
            inner = frame
        elif isinstance(event, Leave):
            assert inner is not None
            inner = inner.parent
        else:
            operations = event.number + 1
            if inner is not None and event.guard != inner.guard:
                _keep_whole(inner, None)
            frame_or_none = inner
            while frame_or_none is not None:
                frame_or_none.operations.append(event)
                frame_or_none = frame_or_none.parent
    return frames


def list_self_contained(trace: Trace) -> dict[str, list[Operation]]:
    """Return the leaves that read only their arguments, tensors made from them, and parameters and buffers.

    Each leaf comes with the operations of all its calls. Such a call needs no tensor from another stage besides its
    arguments, if its states are on its stage.
    """
    found: dict[str, list[Operation]] = {}
    refused: set[str] = set()
    for frame in _rebuild_frames(trace):
        path, own = frame.call.path, {operation.number for operation in frame.operations}
        used = {used for operation in frame.operations for used in operation.uses}
        if frame.has_calls or frame.within_whole() or used - own - set(frame.uses):
            refused.add(path)
        found.setdefault(path, []).extend(frame.operations)
    return {path: operations for path, operations in found.items() if path not in refused}


def _keep_whole(caller: _Frame, called: _Frame | None) -> None:
    if caller.parent is not None:
        caller.is_whole = True
    elif called is not None:
        called.is_whole = called.is_rerun_at_root = True


def list_segments(trace: Trace) -> list[Segment]:
    """Return the smallest runs of calls that a cut may separate, in order.

    Operations between two leaves belong to the first. There is always at least one segment.
    """
    frames = _rebuild_frames(trace)
    anchors = [frame for frame in frames if not frame.within_whole() and (frame.is_whole or not frame.has_calls)]
    anchors = anchors or frames[:1]
    operations = [event for event in trace.events if isinstance(event, Operation)]
    starts = [0, *(frame.first_operation for frame in anchors[1:])]
    forbidden = {
        number
        for number, frame in enumerate(anchors)
        if frame.is_rerun_at_root and any(operation.is_random for operation in frame.operations)
    }
    for operation in operations:
        if operation.changed_since is not None:
            # No cut before an anchor that begins later, up to the one in which the change is.
            forbidden.update(range(bisect(starts, operation.changed_since), bisect(starts, operation.number)))
    cuts = [0, *(number for number in range(1, len(anchors)) if number not in forbidden), len(anchors)]
    runs = [
        (anchors[a:b], range(starts[a], starts[b] if b < len(anchors) else len(operations))) for a, b in pairwise(cuts)
    ]
    return _describe_segments(trace, runs, operations)


def _describe_segments(
    trace: Trace, runs: Sequence[tuple[list[_Frame], range]], operations: Sequence[Operation]
) -> list[Segment]:
    """Add to each run of anchors the states it reads first and the results it sends."""
    consumers: list[tuple[int, int]] = [
        (used, number)
        for number, (anchors, span) in enumerate(runs)
        for uses in [*(operations[i].uses for i in span), *(anchor.uses for anchor in anchors)]
        for used in uses
    ] + [(used, len(runs)) for used in trace.outputs]
    found: list[Segment] = []
    seen: set[str] = set()
    for number, (anchors, span) in enumerate(runs):
        states = dict.fromkeys(name for i in span for name in operations[i].states if name not in seen)
        seen.update(states)
        sends = sorted({used for used, consumer in consumers if used in span and consumer > number})
        found.append(Segment(tuple(anchor.call for anchor in anchors), span, tuple(states), tuple(sends)))
    return found
