"""Policy for CUDA graphs: which calls are recorded, which recordings are kept, and when they end.

Two things are recorded: a whole training step on one GPU per process (``RecordedStep``), and a batch of a pipeline on
all its GPUs (``volseg.parallel.pipeline.recorder``). Both answer the same questions::

    which kind of call is it?     graph.signature of the inputs, graph.modes, and the network's own state
    is it time?                   Recordings.is_warm: after some eager calls, if not refused
    is there room?                Recordings.make_room: few are kept; one that is long idle may be replaced
    how is it recorded?           graph.Graph inside graph.undisturbed
    did anything else happen?     volseg.parallel.state: recorded before an attempt, restored after it, then watched
    what if it fails?             Recordings.refuse: logged once, and calls stay eager

``Recordings`` answers the second, third and last of them. It knows neither CUDA nor networks, and everything in it
follows from the sequence of kinds, which is equal in all processes that work together.

Three decisions differ between the two, because either way would be worse for one of them:

- *Effect of a change of the network.* A step's recordings end with it (``Recorder`` and its ``RecordedState``): the
  network trains, its optimizer belongs to it, and there is room for two recordings. A batch's recordings stay, since
  the network's condition is part of the kind (``Conditions``): training and validation alternate, and each finds its
  own recordings again.
- *Right to refuse.* A step's processes vote after each attempt, since a replaying and an eager process would wait for
  each other's collectives forever; a failure ends all recording. A pipeline is one process, which refuses its kinds of
  batches one by one.
- *Time of undoing an attempt.* Python's effects during the recording of a step count as the step: they are undone only
  if the attempt fails. A recorded batch is followed by its first replay: the attempt is always undone.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from volseg.device.graph import describe_inputs, read_modes
from volseg.parallel.state.recorded import RecordedState

logger = logging.getLogger(__name__)

MOST_CHANGES = 20
"""Limit of new recordings after changes: each costs some eager steps."""

MOST_KINDS = 64
"""Kinds of calls that are counted at a time; with more, the kind changes on every call."""


@dataclass(eq=False)
class Kind:
    """Calls that do the same, and their recording.

    A recording is a function of the inputs with a method ``release``; ``is_free`` tells whether it can be used now.
    """

    calls: int = 0
    """Number of eager calls."""
    recording: Any = None
    last_used: int = 0
    """Number of the call, of all kinds, that last used the recording."""
    refused: str | None = None
    """Reason why calls of this kind are not recorded."""


class Recordings:
    """Kinds of calls, and the recordings of some of them.

    Parameters
    ----------
    warm_up : int
        Number of eager calls of each kind before its recording.
    limit : int
        Recordings kept at a time: each holds the memory of a call.
    idle : int, optional
        Number of calls after which an unused recording may be replaced; by default, it never is.

    Attributes
    ----------
    refused : str or None
        Reason why nothing more is recorded.
    num_recorded : int
        Recordings made so far.
    """

    def __init__(self, *, warm_up: int, limit: int, idle: int | None = None) -> None:
        self.warm_up, self.limit, self._idle = warm_up, limit, idle
        self.refused: str | None = None
        self.num_recorded = 0
        self._calls = 0
        self._kinds: dict[Hashable, Kind] = {}
        self._kept: list[Kind] = []

    @property
    def kept(self) -> list[Kind]:
        """The kinds that have recordings."""
        return list(self._kept)

    def find_kind(self, key: Hashable) -> Kind:
        """Return the kind of call that ``key`` describes."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds = {known: kind for known, kind in self._kinds.items() if kind.recording is not None}
            kind = self._kinds[key] = Kind()
        return kind

    def find(self, key: Hashable, record: Callable[[Kind], None]) -> Any:
        """Return a free recording of this kind of call, or None, and count an eager call.

        ``record`` makes a recording if one is due.
        """
        kind = self.find_kind(key)
        if kind.recording is None and self.is_warm(kind) and self.make_room():
            record(kind)
        if kind.recording is None or not kind.recording.is_free:
            self.count(kind)
            return None
        return self.use(kind)

    def count(self, kind: Kind) -> None:
        """Count an eager call."""
        self._calls += 1
        kind.calls += 1

    def use(self, kind: Kind) -> Any:
        """Return the recording of a kind that has one, for a call that it serves."""
        self._calls += 1
        kind.last_used = self._calls
        return kind.recording

    def is_warm(self, kind: Kind) -> bool:
        """Return whether calls of this kind came often enough to be recorded."""
        return kind.calls >= self.warm_up and kind.refused is None and self.refused is None

    def make_room(self) -> bool:
        """Return whether another recording may be kept; drop one that has long been idle for it."""
        if len(self._kept) < self.limit:
            return True
        if self._idle is None:
            return False
        oldest = min(self._kept, key=lambda kind: kind.last_used)
        if self._calls + 1 - oldest.last_used < self._idle:
            return False
        self.drop(oldest)
        return True

    def keep(self, kind: Kind, recording: Any) -> None:
        """Store the recording of a kind."""
        kind.recording = recording
        kind.last_used = self._calls + 1
        self._kept.append(kind)
        self.num_recorded += 1

    def drop(self, kind: Kind) -> None:
        """Free the recording of a kind."""
        if kind.recording is not None:
            kind.recording.release()
            kind.recording = None
            self._kept.remove(kind)

    def refuse(self, reason: str, kind: Kind | None = None) -> None:
        """Stop recording calls of this kind, or all calls; existing recordings stay in use."""
        if kind is None:
            self.refused = reason
        else:
            kind.refused = reason

    def release(self) -> None:
        """Free all recordings; later calls start over."""
        for kind in self.kept:
            self.drop(kind)
        self._kinds.clear()


class Recorder(Recordings):
    """Run a function eagerly some times per kind of inputs, then record it, then replay the recording.

    Parameters
    ----------
    run : callable
        The function itself.
    record : callable
        Returns a recording (see `Kind`) for inputs like the given ones; raises if it cannot.
    agree : callable
        Returns whether all processes agree; called by all of them after each attempt to record.
    warm_up : int
        Number of eager calls per kind.
    limit : int
        Number of kinds to record; calls of further kinds run eagerly.
    state : RecordedState
        Further state on which the function depends. When it changes, the function is recorded again; it must change
        in all processes in the same way.
    name : str
        Description of the function, for messages.
    advice : str
        How to skip the attempt to record it.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        record: Callable[..., Any],
        agree: Callable[[bool], bool],
        *,
        warm_up: int,
        limit: int,
        state: RecordedState,
        name: str = "the training step",
        advice: str = "set training.record to false, or call the step without RecordedStep",
    ) -> None:
        super().__init__(warm_up=warm_up, limit=limit)
        self._state, self._name, self._advice = state, name, advice
        self._run, self._record, self._agree = run, record, agree
        self._changes = 0

    def __call__(self, *inputs: Any) -> Any:
        """Run the function on ``inputs``: eagerly, recording or by replay."""
        key = describe_inputs(inputs)
        if key is None:
            return self._run(*inputs)
        if self.is_replaying and (changed := self._state.find_change()) is not None:
            self._begin_anew(changed)
        recording = self.find((*key, *read_modes()), lambda kind: self._try_to_record(kind, inputs))
        return (recording or self._run)(*inputs)

    @property
    def is_replaying(self) -> bool:
        """Whether there are recordings."""
        return bool(self._kept)

    def _begin_anew(self, changed: str) -> None:
        self.release()
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self.refuse(f"{changed} keeps changing")
            logger.warning("%s runs kernel by kernel from now on: %s", self._name, self.refused)
        else:
            logger.info("%s has changed since %s was recorded as a CUDA graph: recording again", changed, self._name)

    def _try_to_record(self, kind: Kind, inputs: tuple[Any, ...]) -> None:
        recording, reason, kept = None, "in another process", False
        self._state.begin()
        try:
            recording = self._record(*inputs)
            self._state.keep()
            kept = True
        except Exception as fault:  # any error: this process must not leave the others waiting
            reason = str(fault).partition("\n")[0] or type(fault).__name__
        if self._agree(kept):
            assert recording is not None
            self.keep(kind, recording)
            self._state.done()
            return
        if recording is not None:
            recording.release()
        self._state.put_back()
        self.refuse(reason)
        logger.warning(
            "%s cannot be recorded as a CUDA graph and runs kernel by kernel (%s); to skip the attempt, %s",
            *(self._name, reason, self._advice),
        )
