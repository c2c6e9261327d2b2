"""Stop between two batches when a signal asks for it, instead of in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interruption", "StopRequested", "catch_signals", "stop_if_requested"]

_listening: list["Interruption"] = []
"""Who catches signals now, the innermost last; signals are the process's, so this is too."""


class StopRequested(Exception):  # noqa: N818  (no error: what was begun is left, and can be done again)
    """A signal came while something long was under way that a training can do again."""


def stop_if_requested() -> None:
    """Leave a long task between two of its parts if a signal was caught; without `catch_signals` around, do nothing.

    Raises
    ------
    StopRequested
        To be caught by whoever catches the signals.
    """
    if _listening and _listening[-1]:
        raise StopRequested


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
        """End as the signal would have: KeyboardInterrupt for Ctrl-C, exit status 128 + n for others."""
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)


@contextmanager
def catch_signals() -> Iterator[Interruption]:
    """Record the first SIGINT or SIGTERM; the second acts at once, as if nobody listened.

    Python delivers signals to the main thread only; elsewhere the context does nothing.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def record(number: int, frame: FrameType | None) -> None:
        del frame
        interruption.signal = signal.Signals(number)
        restore()

    for number in before:
        signal.signal(number, record)
    _listening.append(interruption)
    try:
        yield interruption
    finally:
        _listening.remove(interruption)
        restore()
