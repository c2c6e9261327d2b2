"""When to record a function of repeated signature, and what to do when it cannot be recorded.

Apart from CUDA: the three effects (run, record, agree) are passed in. Processes that work together must decide alike,
since one that replays and one that computes would wait for each other's collectives for ever. So everything here
follows from the sequence of signatures, which all of them see, and from one vote after each attempt.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from volseg.parallel.capture import signature

__all__ = ["Recorder", "Recording"]

logger = logging.getLogger(__name__)


class Recording(Protocol):
    """A recorded function."""

    def __call__(self, *inputs: Any) -> Any:
        """Run it on inputs of the recorded signature."""

    def release(self) -> None:
        """Free what it holds."""


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
    ) -> None:
        self._run, self._record, self._agree = run, record, agree
        self.warm_up, self.limit = warm_up, limit
        self.refused: str | None = None
        self.num_recorded = 0
        self._calls: dict[Any, int] = {}
        self._recordings: dict[Any, Recording] = {}

    def __call__(self, *inputs: Any) -> Any:
        """Run the function on ``inputs``, in the way that is due."""
        key = signature(inputs)
        if key not in self._recordings and self._is_due(key):
            self._try_to_record(key, inputs)
        if key in self._recordings:
            return self._recordings[key](*inputs)
        return self._run(*inputs)

    def release(self) -> None:
        """Free all recordings; later calls begin anew."""
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._calls.clear()

    def _is_due(self, key: Any) -> bool:
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        return calls > self.warm_up and len(self._recordings) < self.limit and self.refused is None

    def _try_to_record(self, key: Any, inputs: tuple[Any, ...]) -> None:
        recording, reason = None, "in another process"
        try:
            recording = self._record(*inputs)
        except Exception as fault:  # whatever it was: alone, this process must not leave the others waiting
            reason = str(fault).partition("\n")[0] or type(fault).__name__
        if self._agree(recording is not None):
            assert recording is not None
            self._recordings[key] = recording
            self.num_recorded += 1
            return
        if recording is not None:
            recording.release()
        self.refused = reason
        logger.warning(
            "the training step cannot be recorded as a CUDA graph and runs kernel by kernel (%s); to skip the attempt, "
            "set training.capture to false, or call the step without CapturedStep",
            reason,
        )
