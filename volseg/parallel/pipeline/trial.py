"""Time whole steps of training, launched eagerly and from a recording, to keep the quicker of the two.

A recording holds a batch's activations for good, so it must pay. Which is quicker depends on the network, the GPU and
the host: small kernels are bound by Python, large ones are not. What is timed is the way from one call of the network
to the next, with whatever the training loop does in between, since that is what a user waits for.
"""

import time
from collections.abc import Callable, Iterable

import torch

__all__ = ["TIMED", "Trial", "clock"]

TIMED = 2
"""Steps timed of each; the quicker counts, since a validation or a slow disk may fall into one."""

WORTH = 0.97
"""A recording is kept if its steps take less than this share of eager ones."""


def clock(devices: Iterable[torch.device]) -> Callable[[], float]:
    """Return a clock that reads the time at which all that was launched on ``devices`` has been done."""

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

    Examples
    --------
    >>> trial = Trial(iter([0.0, 5.0, 10.0, 13.0, 17.0]).__next__)
    >>> for is_recorded in (False, False, True, True, None):
    ...     trial.begin(is_recorded)
    >>> trial.is_over, trial.pays
    (True, True)
    >>> print(trial)
    3000.0 ms recorded, 5000.0 ms eagerly
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._running: bool | None = None
        self._since = 0.0

    def begin(self, is_recorded: bool | None) -> None:
        """Note that a step begins, and the one before has ended; ``None`` if it is not to be timed."""
        now = self._clock()
        if self._running is not None:
            self._seconds[self._running].append(now - self._since)
        self._running, self._since = is_recorded, now

    @property
    def is_over(self) -> bool:
        """Whether both ways have been timed."""
        return min(map(len, self._seconds.values())) >= TIMED

    @property
    def pays(self) -> bool:
        """Whether recorded steps were quicker."""
        return min(self._seconds[True]) < WORTH * min(self._seconds[False])

    def __str__(self) -> str:
        recorded, eager = (min(self._seconds[mode]) * 1e3 for mode in (True, False))
        return f"{recorded:.1f} ms recorded, {eager:.1f} ms eagerly"
