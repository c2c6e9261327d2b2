"""When to record a function of repeated signature, and what to do when it cannot be recorded.

Apart from CUDA: the three effects (run, record, agree) are passed in. Processes that work together must decide alike,
since one that replays and one that computes would wait for each other's collectives for ever. So everything here
follows from the sequence of signatures, which all of them see, and from one vote after each attempt.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from volseg.device.graph import modes, signature

__all__ = ["Recorder", "Recording"]

logger = logging.getLogger(__name__)

MOST_CHANGES = 20
"""Times that recordings are made anew because something has changed: each takes some steps kernel by kernel."""


class Recording(Protocol):
    """A recorded function."""

    def __call__(self, *inputs: Any) -> Any:
        """Run it on inputs of the recorded signature."""

    def release(self) -> None:
        """Free what it holds."""


class State(Protocol):
    """What a recording depends on besides its inputs; see ``RecordedState``."""

    def begin(self) -> None:
        """Note everything before an attempt to record."""

    def keep(self) -> None:
        """Watch from now on; raises where the function did what a replay would not do."""

    def put_back(self) -> None:
        """Undo an attempt that is given up."""

    def done(self) -> None:
        """Forget what an attempt would be undone with."""

    def change(self) -> str | None:
        """Name what is not as it was when the function was recorded, or None."""


class Stateless:
    """The state of a function that depends on its inputs alone."""

    def begin(self) -> None:
        """Note nothing."""

    keep = put_back = done = begin

    def change(self) -> None:
        """Find nothing changed."""


class Recorder:
    """Run a function as it is some times per signature, then record it, then replay the recording.

    Parameters
    ----------
    run : callable
        The function itself.
    record : callable
        Returns a `Recording` for inputs like the given ones; raises where it cannot.
    agree : callable
        Whether all processes say yes; called by all of them after each attempt to record.
    warm_up : int
        Calls per signature that run as they are.
    limit : int
        Signatures to record; calls with further ones run as they are.
    state : State, optional
        What else the function depends on. Where it changes, recordings are freed and made anew; it must change in all
        processes alike.

    Attributes
    ----------
    refused : str or None
        Why nothing is recorded any more, where recording failed: here, or in another process.
    num_recorded : int
        Recordings made so far.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        record: Callable[..., Recording],
        agree: Callable[[bool], bool],
        *,
        warm_up: int,
        limit: int,
        state: State | None = None,
    ) -> None:
        self._state: State = Stateless() if state is None else state
        self._run, self._record, self._agree = run, record, agree
        self.warm_up, self.limit = warm_up, limit
        self.refused: str | None = None
        self.num_recorded = 0
        self._changes = 0
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Recording] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run the function on ``inputs``, in the way that is due."""
        key = signature(inputs)
        if key is None:
            return self._run(*inputs)
        key = *key, *modes()
        if self._recordings and (changed := self._state.change()) is not None:
            self._begin_anew(changed)
        if key not in self._recordings and self._is_due(key):
            self._try_to_record(key, inputs)
        if key in self._recordings:
            return self._recordings[key](*inputs)
        return self._run(*inputs)

    @property
    def is_replaying(self) -> bool:
        """Whether there are recordings by now."""
        return bool(self._recordings)

    def release(self) -> None:
        """Free all recordings; later calls begin anew."""
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._calls.clear()

    def _begin_anew(self, changed: str) -> None:
        self.release()
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self.refused = f"{changed} changes again and again"
            logger.warning("the training step runs kernel by kernel from now on: %s", self.refused)
        else:
            logger.info("%s has changed since the training step was recorded as a CUDA graph: recording anew", changed)

    def _is_due(self, key: Any) -> bool:
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        return calls > self.warm_up and len(self._recordings) < self.limit and self.refused is None

    def _try_to_record(self, key: Any, inputs: tuple[Any, ...]) -> None:
        recording, reason, kept = None, "in another process", False
        self._state.begin()
        try:
            recording = self._record(*inputs)
            self._state.keep()
            kept = True
        except Exception as fault:  # whatever it was: alone, this process must not leave the others waiting
            reason = str(fault).partition("\n")[0] or type(fault).__name__
        if self._agree(kept):
            assert recording is not None
            self._recordings[key] = recording
            self.num_recorded += 1
            self._state.done()
            return
        if recording is not None:
            recording.release()
        self._state.put_back()
        self.refused = reason
        logger.warning(
            "the training step cannot be recorded as a CUDA graph and runs kernel by kernel (%s); to skip the attempt, "
            "set training.capture to false, or call the step without RecordedStep",
            reason,
        )
