"""The seconds of an epoch, over all interruptions, and those of them that went by waiting for batches."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EpochClock"]


class EpochClock:
    """What an epoch has taken so far.

    Whoever asks in the middle of an epoch, a checkpoint or the end by an error, must not find the seconds spent waiting
    there without those in which they lie: `count` before.

    Parameters
    ----------
    seconds, waited : float
        Of the epoch's beginning, before an interruption.
    """

    def __init__(self, seconds: float = 0.0, waited: float = 0.0) -> None:
        self.seconds, self.waited = seconds, waited
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._turned = time.perf_counter()

    def count(self) -> float:
        """Add what went by since the last time; return the time of now."""
        before, self._turned = self._turned, time.perf_counter()
        self.seconds += self._turned - before
        return self._turned

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what goes by in here as spent waiting, too."""
        asked = self.count()
        yield
        self.waited += self.count() - asked
