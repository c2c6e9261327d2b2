"""Trace of one ``forward``: its calls and operations, and the runs of module calls that must stay together.

This module is pure: an ``Observer`` reports calls and operations. A pipeline may be cut only just before the call of a
*leaf* (a module that calls no other module), and not everywhere:

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
class Operation:
    """One torch function."""

    number: int
    uses: tuple[int, ...] = ()
    """Operations whose results it reads."""
    states: tuple[str, ...] = ()
    """Parameters and buffers it reads, by name."""
    changed_since: int | None = None
    """The operation that made (or first read) the oldest memory that this one changes in place."""
    is_random: bool = False
    """Whether it drew from a generator."""


@dataclass(slots=True)
class CallFrame:
    """A module call."""

    call: Call
    guard: int
    parent: "CallFrame | None"
    first_operation: int
    uses: tuple[int, ...]
    """Operations whose results are its arguments."""
    has_calls: bool = False
    is_whole: bool = False
    is_rerun_at_root: bool = False
    is_random: bool = False

    def within_whole(self) -> bool:
        """Whether a caller is kept whole."""
        return self.parent is not None and (self.parent.is_whole or self.parent.within_whole())


@dataclass
class Trace:
    """The calls of one forward, in the order of entering (the first is the network itself), and its operations."""

    frames: list[CallFrame] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    """Operations that made the outputs."""
    written: set[str] = field(default_factory=set)
    """Parameters and buffers that forward changes."""
    _inner: CallFrame | None = None

    def enter(self, call: Call, uses: tuple[int, ...] = (), guard: int = 0) -> None:
        """Add the start of a module call; ``guard`` differs from the caller's if ``checkpoint`` is in between."""
        frame = CallFrame(call, guard, self._inner, len(self.operations), uses)
        if self._inner is not None:
            self._inner.has_calls = True
            if guard != self._inner.guard:
                _keep_whole(self._inner, frame)
        self.frames.append(frame)
        self._inner = frame

    def leave(self) -> None:
        """Add the end of the innermost call."""
        assert self._inner is not None
        self._inner = self._inner.parent

    def add(self, operation: Operation, guard: int = 0) -> None:
        """Add a torch function."""
        if self._inner is not None and guard != self._inner.guard:
            _keep_whole(self._inner, None)
        caller = self._inner
        while caller is not None:
            caller.is_random |= operation.is_random
            caller = caller.parent
        self.operations.append(operation)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls between two places where the network may be cut."""

    calls: tuple[Call, ...]
    operations: range
    states: tuple[str, ...] = ()
    """Parameters and buffers read here and in no earlier segment."""
    sends: tuple[int, ...] = ()
    """Operations whose results later segments, or the caller, use."""


def _keep_whole(caller: CallFrame, called: CallFrame | None) -> None:
    if caller.parent is not None:
        caller.is_whole = True
    elif called is not None:
        called.is_whole = called.is_rerun_at_root = True


def list_segments(trace: Trace) -> list[Segment]:
    """Return the smallest runs of calls that a cut may separate, in order.

    Operations between two leaves belong to the first. There is always at least one segment.
    """
    anchors = [frame for frame in trace.frames if not frame.within_whole() and (frame.is_whole or not frame.has_calls)]
    anchors = anchors or trace.frames[:1]
    operations = trace.operations
    starts = [0, *(frame.first_operation for frame in anchors[1:])]
    forbidden = {number for number, frame in enumerate(anchors) if frame.is_rerun_at_root and frame.is_random}
    for operation in operations:
        if operation.changed_since is not None:
            # No cut before an anchor that begins later, up to the one in which the change is.
            forbidden.update(range(bisect(starts, operation.changed_since), bisect(starts, operation.number)))
    cuts = [0, *(number for number in range(1, len(anchors)) if number not in forbidden), len(anchors)]
    runs = [
        (anchors[a:b], range(starts[a], starts[b] if b < len(anchors) else len(operations))) for a, b in pairwise(cuts)
    ]
    return _describe_segments(trace, runs)


def _describe_segments(trace: Trace, runs: Sequence[tuple[list[CallFrame], range]]) -> list[Segment]:
    """Add to each run of anchors the states it reads first and the results it sends."""
    consumers: list[tuple[int, int]] = [
        (used, number)
        for number, (anchors, span) in enumerate(runs)
        for uses in [*(trace.operations[i].uses for i in span), *(anchor.uses for anchor in anchors)]
        for used in uses
    ] + [(used, len(runs)) for used in trace.outputs]
    found: list[Segment] = []
    seen: set[str] = set()
    for number, (anchors, span) in enumerate(runs):
        states = dict.fromkeys(name for i in span for name in trace.operations[i].states if name not in seen)
        seen.update(states)
        sends = sorted({used for used, consumer in consumers if used in span and consumer > number})
        found.append(Segment(tuple(anchor.call for anchor in anchors), span, tuple(states), tuple(sends)))
    return found
