"""Record signals, so that a training stops between two batches instead of within one."""

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

_listening: list["Interruption"] = []
"""Active `catch_signals` contexts, the innermost last; global, as signals belong to the process."""


class StopRequested(Exception):  # noqa: N818  (no error: the work can be repeated)
    """A signal arrived during a long task, such as a validation, that a resumed training repeats."""


def stop_if_requested() -> None:
    """Raise if a signal was caught, between two parts of a long task; do nothing outside `catch_signals`.

    Raises
    ------
    StopRequested
        The caller that catches the signals must catch it.
    """
    if _listening and _listening[-1]:
        raise StopRequested


def request_stop() -> None:
    """Ask this process to stop, from any thread, like SIGTERM; a later SIGTERM counts as the first signal."""
    if _listening:
        _listening[-1].take(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


class Interruption:
    """The signal that arrived, or None."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def take(self, number: int) -> None:
        """Adopt a signal that another process of the job received; 0 means none."""
        if number:
            self.signal = signal.Signals(number)

    def raise_as_signal(self) -> None:
        """Raise as the signal would have; do nothing without a signal."""
        if self.signal is not None:
            raise_as_signal(self.signal)


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Record the first signal of `ENDING`; a second one acts at once, with the former handler.

    Python delivers signals to the main thread only; elsewhere the context does nothing. An ignored SIGHUP (``nohup``)
    stays ignored.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    # Python can neither name nor restore a handler that C installed.
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
    """Number of batches between two checks for signals, adapted so that they take about two seconds.

    On a GPU a check waits for the device, which lags behind: more checks cost time, fewer delay the response to a
    signal.

    Parameters
    ----------
    most : int
        Largest number of batches between two checks.
    seconds : float
        Longest time between two checks.
    """

    def __init__(self, most: int, seconds: float = 2.0) -> None:
        self.most = most
        self.seconds = seconds
        self.batches = 1  # the first batch's duration is unknown
        self.begin()

    def begin(self) -> None:
        """Start to count and time batches."""
        self._begin = time.perf_counter()
        self._count = 0

    def count(self) -> None:
        """Count a batch."""
        self._count += 1

    @property
    def is_due(self) -> bool:
        """Whether the next check is due."""
        return self._count >= self.batches

    def measure(self) -> float:
        """Return the mean seconds per batch since the last check; call right after a wait for the device."""
        return (time.perf_counter() - self._begin) / max(self._count, 1)

    def adapt(self, seconds_per_batch: float) -> None:
        """Choose the next interval from the slowest process's time."""
        self.batches = max(1, min(self.most, int(self.seconds / max(seconds_per_batch, 1e-9))))
        self.begin()


class Stopping:
    """Agree over all processes of a job on whether a signal arrived.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self.interval = LookInterval(CHECK_EVERY if device.type == "cuda" else 1)
        self._interruption = Interruption()
        self._device = device

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Catch signals inside the context."""
        with catch_signals() as self._interruption:
            yield

    def raise_as_signal(self) -> None:
        """Raise as the caught signal would have; do nothing without one."""
        self._interruption.raise_as_signal()

    def agree(self, seconds_per_batch: float | None = None) -> bool:
        """Return whether a signal arrived at any process of the job.

        If ``seconds_per_batch`` is given, all processes choose the same next interval, from the slowest process's time.
        """
        # One number, for one collective. The signal has the high bits: it ends the run whatever the time is.
        microseconds = min(int(1e6 * (seconds_per_batch or 0.0)), 2**40 - 1)
        largest = largest_over_processes((self._interruption.signal or 0) * 2**40 + microseconds, self._device)
        number, slowest = divmod(largest, 2**40)
        self._interruption.take(number)
        if seconds_per_batch is not None:
            self.interval.adapt(slowest / 1e6)
        return bool(self._interruption)
