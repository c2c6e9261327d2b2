"""Time whole training steps, run in several ways, to keep the fastest.

The fastest way depends on the network, the GPU and the host. Small kernels are bound by Python, large ones are not, and
a recording holds a batch's activations permanently, so it must pay. Micro-batches that share a GPU fill it better if
one
leaves multiprocessors idle, but fill and drain the pipeline in pairs. The timed interval is from one call of the
network to the next, including the training loop between them, since that is what a user waits for.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["EAGER", "TIMED", "Trial", "make_clock"]

EAGER = 0
"""The way without a recording; others are numbers of lanes."""

TIMED = 2
"""Timed steps per way; the faster counts, since a validation or a slow disk may fall into one."""

WORTH = 0.97
"""A later way is taken if its steps take less than this share of an earlier one's."""


def make_clock(devices: Iterable[torch.device]) -> Callable[[], float]:
    """Return a clock that waits for all queued work on ``devices`` before it reads the time."""

    def now() -> float:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


class Trial:
    """Times of the steps of one kind of batch.

    Parameters
    ----------
    clock
        Returns seconds.
    ways
        In the order of preference; if there is only one, nothing is timed.

    Examples
    --------
    >>> trial = Trial(iter([0.0, 5.0, 5.0, 10.0, 10.0, 13.0, 13.0, 17.0]).__next__, ways=(EAGER, 1))
    >>> for _ in range(4):
    ...     trial.begin(trial.way)
    ...     trial.end()
    >>> trial.is_over, trial.way
    (True, 1)
    >>> print(trial)
    eagerly 5000.0 ms, recorded (1 lane) 3000.0 ms
    """

    def __init__(self, clock: Callable[[], float], ways: Sequence[int]) -> None:
        self._clock = clock
        self._seconds: dict[int, list[float]] = {way: [] for way in ways}
        self._running: int | None = None
        self._since = 0.0

    def end(self) -> None:
        """Record the end of the previous step, if it was timed."""
        if self._running is not None:
            self._seconds[self._running].append(self._clock() - self._since)
        self._running = None

    def begin(self, way: int) -> None:
        """Record the start of a step that runs in ``way``."""
        self.end()
        if not self.is_over:
            self._running, self._since = way, self._clock()

    def exclude(self, way: int) -> None:
        """Remove an impossible way."""
        del self._seconds[way]

    @property
    def _untimed(self) -> list[int]:
        return [way for way, seconds in self._seconds.items() if len(seconds) < TIMED]

    @property
    def is_over(self) -> bool:
        """Whether every way has been timed, or there is no choice."""
        return len(self._seconds) < 2 or not self._untimed

    @property
    def way(self) -> int:
        """The next way to time, or the best."""
        if not self._seconds:
            return EAGER
        if not self.is_over:
            return self._untimed[0]
        best, *others = self._seconds
        for way in others:
            if min(self._seconds[way]) < WORTH * min(self._seconds[best]):
                best = way
        return best

    def __str__(self) -> str:
        names = {EAGER: "eagerly", 1: "recorded (1 lane)"}
        return ", ".join(
            f"{names.get(way, f'recorded ({way} lanes)')} {min(seconds) * 1e3:.1f} ms"
            for way, seconds in self._seconds.items()
            if seconds
        )
