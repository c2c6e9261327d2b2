"""What SIGINT, SIGTERM and SIGHUP do to a command, from its first statement on.

- While modules are imported and no work has begun, a signal ends the process at once, with one line: `end_on_signals`.
- While a verb works, a signal raises, so that half-written files and locks are removed: `unwinding_on_signals`. It
  never raises in the middle of an import, where C code swallows exceptions (numpy's does), modules stay half imported,
  and locks of modules stay held; there it waits for the end of the import, some seconds at most.
- A training records signals and stops between two batches: `volseg.workflow.interrupts`.

A handler imports nothing and takes no lock. This module is imported before anything that takes time.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

TYPE_CHECKING = False  # without typing and threading: Ctrl-C shows a traceback of Python until this is imported
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = [
    "ENDING",
    "INTERRUPTED",
    "ONE_EVENT_SECONDS",
    "end_in_system",
    "end_on_signals",
    "find_way_on",
    "raise_as_signal",
    "unwinding_on_signals",
]

ENDING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""Ctrl-C, what clusters end jobs with, and what a terminal sends when it is closed."""

INTERRUPTED = tuple(128 + number for number in ENDING)
"""Exit statuses."""

ONE_EVENT_SECONDS = 2.0
"""A launcher passes on a signal that the system has sent to its processes as well: within this time it is the same."""

SECONDS_BETWEEN_TRIES = 0.05
"""After which a signal that waits for the end of an import tries again."""

LONGEST_IMPORT_SECONDS = 10.0
"""After which an import hangs, on a dead network disk say, and the process ends in the middle of it."""

LAUNCHING = ("volseg", "volseg.__main__", "volseg.cli", "volseg.experiment", "volseg.importing")
"""Modules whose frames do no work of their own; those of the command line (``volseg.cli.*``) do none either."""

WAYS_ON = {
    "train": "a training that had begun is saved, go on with it by --resume",
    "cross-validate": "a training that had begun is saved, go on with it by --resume",
    "quickstart": "begin anew with another --output; a training that had begun is saved, go on with it by the command "
    "in the first line",
    "predict": "the label maps that are written are whole, go on with the others by --resume",
}
"""What to do by verb, after an interruption or a refusal of the system; the other verbs are begun again."""


def end_on_signals() -> None:
    """Let signals end this process at once, with one line; those that are ignored stay so. For the main thread."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def end_in_system() -> None:
    """Leave SIGTERM and SIGHUP to the system: a process that waits for others in C++ runs no handler of Python's."""
    for number in _list_heard(set(ENDING) - {signal.SIGINT}):
        signal.signal(number, signal.SIG_DFL)


def _list_heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this thread may handle; those that are ignored, as ``nohup`` does, stay so."""
    import threading  # not for the first statement of a command

    is_main = threading.current_thread() is threading.main_thread()
    return [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]


def _end(number: int, frame: FrameType | None = None) -> "NoReturn":
    """End this process: it has begun nothing, or must not wait any longer."""
    del frame
    # The processes of a job are ended together, and the first one tells.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        words = f"volseg: interrupted; {find_way_on()}"
        if "--json-logs" in sys.argv or "json" in os.environ.get("VOLSEG_LOGS", ""):
            words = f'{{"time": {time.time()}, "level": "ERROR", "logger": "volseg", "message": "{words}"}}'
        with suppress(OSError):  # closed, or nobody reads it any more
            os.write(2, f"{words}\n".encode())  # sys.stderr may be in the middle of a line
    os._exit(128 + number)


def find_way_on() -> str:
    """Return how what the command line asked for is gone on with."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return WAYS_ON.get(verb, "run the same command again")


def raise_as_signal(number: int) -> "NoReturn":
    """End as a signal does: KeyboardInterrupt for Ctrl-C, exit status 128 + n for others."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def unwinding_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals raise in the main thread while a verb works, and do what they did before behind it.

    Parameters
    ----------
    *numbers
        Of the signals; of all of `ENDING` by default. Those that are ignored stay so.
    """
    handler = _Unwinding()
    before = {number: signal.signal(number, handler) for number in _list_heard(numbers or ENDING)}
    try:
        yield
    finally:
        for number, former in before.items():
            if former is not None:  # else C installed it, and Python cannot put it back
                signal.signal(number, former)


class _Unwinding:
    """Raises what a signal asks for, where an exception reaches whoever must undo something."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the signal came that waits for the end of an import."""
        self._is_try = False
        """Whether the next signal is that one again."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise, wait, or end the process."""
        is_try, self._is_try = self._is_try, False
        can_raise, has_begun = _look_around(frame)
        if not has_begun:  # nor is there anybody who would hear it, while the command line is put together
            _end(number)
        if can_raise:
            self._since = None
            raise_as_signal(number)
        if self._since is None:
            self._since = time.monotonic()
            _thread.start_new_thread(self._try_again, (number, _thread.get_ident()))  # those of `threading` take locks
        elif time.monotonic() - self._since > (LONGEST_IMPORT_SECONDS if is_try else ONE_EVENT_SECONDS):
            _end(number)  # the import hangs, or somebody asks a second time

    def _try_again(self, number: int, main: int) -> None:
        while self._since is not None:
            time.sleep(SECONDS_BETWEEN_TRIES)
            self._is_try = signal.getsignal(number) is self
            if not self._is_try:  # what catches signals by now takes it once
                self._since = None
            if hasattr(signal, "pthread_kill"):  # which ends a call of the system that the main thread waits in
                signal.pthread_kill(main, number)
            else:
                signal.raise_signal(number)


def _look_around(frame: FrameType | None) -> tuple[bool, bool]:
    """Return whether what is raised here is heard, and whether work has begun that would have to be undone.

    Nobody hears it in an import and in ``__del__``. Work of volseg's outside of an import has begun something; a verb
    that imports what it needs has not.
    """
    can_raise, has_begun = True, False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            can_raise = has_begun = False
        elif module.startswith("volseg.") and module not in LAUNCHING and not module.startswith("volseg.cli."):
            has_begun = True
        frame = frame.f_back
    return can_raise, has_begun
