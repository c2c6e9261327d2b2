"""Stop between two batches when a signal asks for it, instead of in the middle of one."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from volseg.parallel.processes.group import largest_over_processes
from volseg.signals import ENDING, ONE_EVENT_SECONDS, raise_as_signal
from volseg.workflow.epoch import CHECK_EVERY

__all__ = [
    "Interruption",
    "LookInterval",
    "StopRequested",
    "Stopping",
    "catch_signals",
    "request_stop",
    "stop_if_requested",
]


_listening: list["Interruption"] = []
"""Who catches signals now, the innermost last; signals are the process's, so this is too."""


class StopRequested(Exception):  # noqa: N818  (no error: what was begun is left, and can be done again)
    """A signal came while something long was under way that a training can do again."""


def stop_if_requested() -> None:
    """Leave a long task between two of its parts if a signal was caught; without `catch_signals` around, do nothing.

    Raises
    ------
    StopRequested
        The caller that catches the signals must catch it.
    """
    if _listening and _listening[-1]:
        raise StopRequested


def request_stop() -> None:
    """Ask this process to stop, from any thread, as SIGTERM would; a SIGTERM that comes later is the first one."""
    if _listening:
        _listening[-1].take(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


class Interruption:
    """Which signal came, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def take(self, number: int) -> None:
        """Take over a signal that another process of the job received; 0 is none."""
        if number:
            self.signal = signal.Signals(number)

    def raise_as_signal(self) -> None:
        """End as the signal would have."""
        if self.signal is not None:
            raise_as_signal(self.signal)


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Record the first signal of `ENDING`; a second one acts at once, as if nobody listened.

    Python delivers signals to the main thread only; elsewhere the context does nothing. A SIGHUP that is ignored, as
    ``nohup`` makes it, stays so.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    # What C installed Python cannot name, nor put back.
    before = {number: handler for number in ENDING if (handler := signal.getsignal(number)) is not None}
    if hasattr(signal, "SIGHUP") and before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    received: list[float] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(time.monotonic())
        if received[-1] - received[0] > ONE_EVENT_SECONDS:
            restore()
            signal.raise_signal(number)
        elif not interruption:
            interruption.signal = signal.Signals(number)

    for number in before:
        signal.signal(number, record)
    _listening.append(interruption)
    try:
        yield interruption
    finally:
        _listening.remove(interruption)
        restore()


class LookInterval:
    """How many batches may go by between two looks at the signals: few enough that they take about two seconds.

    On a GPU a look waits for the device, which lags behind: more looks cost time, fewer let a signal wait.

    Parameters
    ----------
    most : int
        Batches between two looks, however fast they are.
    seconds : float
        What they should take, at most.
    """

    def __init__(self, most: int, seconds: float = 2.0) -> None:
        self.most = most
        self.seconds = seconds
        self.batches = 1  # nothing is known of the first one
        self.begin()

    def begin(self) -> None:
        """Count and time batches from now on."""
        self._begin = time.perf_counter()
        self._count = 0

    def count(self) -> None:
        """Count a batch."""
        self._count += 1

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return self._count >= self.batches

    def measure(self) -> float:
        """Return the seconds that a batch took since the last look; right after a look at what the device computed."""
        return (time.perf_counter() - self._begin) / max(self._count, 1)

    def adapt(self, seconds_per_batch: float) -> None:
        """Choose when to look next, by the slowest process's time."""
        self.batches = max(1, min(self.most, int(self.seconds / max(seconds_per_batch, 1e-9))))
        self.begin()


class Stopping:
    """A signal that came to any process of the job, and the batches between two looks for one.

    Parameters
    ----------
    device : torch.device
        Of the training; a look at a GPU waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.interval = LookInterval(CHECK_EVERY if device.type == "cuda" else 1)
        self._interruption = Interruption()
        self._device = device

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch signals in here."""
        with catch_signals() as self._interruption:
            yield

    def raise_as_signal(self) -> None:
        """End as the signal would have that came, if one did."""
        self._interruption.raise_as_signal()

    def agree(self, seconds_per_batch: float | None = None) -> bool:
        """Tell whether a signal came, to this process or to any other of the job.

        With a time all of them look again after the same number of batches, by the time of the slowest.
        """
        # One number, because it is one collective: signals first, which end the run whatever the time is.
        microseconds = min(int(1e6 * (seconds_per_batch or 0.0)), 2**40 - 1)
        largest = largest_over_processes((self._interruption.signal or 0) * 2**40 + microseconds, self._device)
        number, slowest = divmod(largest, 2**40)
        self._interruption.take(number)
        if seconds_per_batch is not None:
            self.interval.adapt(slowest / 1e6)
        return bool(self._interruption)
