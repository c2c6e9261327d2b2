"""Handlers of SIGINT, SIGTERM and SIGHUP, installed by a command's first statement.

- While modules are imported and no work has begun, a signal ends the process at once, with one line: `end_on_signals`.
- While a command works, a signal raises, so that half-written files and locks are removed: `unwinding_on_signals`. It
  never raises during an import: C code swallows exceptions there (numpy's does), modules stay half imported, and their
  locks stay held. The signal waits for the end of the import, a few seconds at most.
- A training records signals and stops between two batches: `volseg.workflow.checks`.

A handler imports nothing and takes no lock. This module is imported before any slow import.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

TYPE_CHECKING = False  # typing and threading are slow imports: until this module is imported, Ctrl-C shows a traceback
if TYPE_CHECKING:
    from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of a cluster that ends a job, and of a closed terminal."""

INTERRUPTED = tuple(128 + number for number in ENDING)
"""Exit statuses."""

ONE_EVENT_SECONDS = 2.0
"""Signals closer than this count as one: a launcher forwards signals that the system also sends to its processes."""

SECONDS_BETWEEN_TRIES = 0.05
"""Pause before a signal that waits for the end of an import is sent again."""

LONGEST_IMPORT_SECONDS = 10.0
"""An import that takes longer hangs, on a dead network disk for example: the process ends during it."""

LAUNCHING = ("volseg", "volseg.__main__", "volseg.cli", "volseg.experiment", "volseg.importing")
"""Modules whose frames do not count as work; neither do those of the command line (``volseg.cli.*``)."""

RESUME_HINTS = {
    "train": "a training that had begun is saved; continue it with --resume",
    "cross-validate": "a training that had begun is saved; continue it with --resume",
    "search": "finished trials are saved; run the same command again to continue",
    "quickstart": "start again with another --output; a training that had begun is saved: continue it by the command "
    "in the first line",
    "predict": "every written label map is complete; continue with --resume",
}
"""Hint on how to continue after an interruption, by command; other commands are run again."""


def end_on_signals() -> None:
    """Let signals end this process at once, with one line. Ignored signals stay ignored. For the main thread."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def use_default_handlers() -> None:
    """Let the system handle SIGTERM and SIGHUP: a process that waits in C++ for others runs no Python handler."""
    for number in _list_handled(set(ENDING) - {signal.SIGINT}):
        signal.signal(number, signal.SIG_DFL)


def _list_handled(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this thread may handle, without ignored ones (``nohup``)."""
    import threading  # slow, so not at the top

    is_main = threading.current_thread() is threading.main_thread()
    return [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]


def _end(number: int, frame: FrameType | None = None) -> "NoReturn":
    """End this process at once."""
    del frame
    # The processes of a job end together; the first one prints.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        words = f"volseg: interrupted; {describe_resume()}"
        if "--json-logs" in sys.argv or "json" in os.environ.get("VOLSEG_LOGS", ""):
            words = f'{{"time": {time.time()}, "level": "ERROR", "logger": "volseg", "message": "{words}"}}'
        with suppress(OSError):  # the reader is gone
            os.write(2, f"{words}\n".encode())  # sys.stderr may be in the middle of a line
    os._exit(128 + number)


def describe_resume() -> str:
    """Return how to continue what the command line asked for."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return RESUME_HINTS.get(verb, "run the same command again")


def raise_as_signal(number: int) -> "NoReturn":
    """Raise KeyboardInterrupt for Ctrl-C, and SystemExit with status 128 + n for other signals."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def unwinding_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals raise in the main thread while a verb works; restore their handlers afterwards.

    Parameters
    ----------
    *numbers
        `ENDING` by default. Ignored signals stay ignored.
    """
    handler = _Unwinding()
    before = {number: signal.signal(number, handler) for number in _list_handled(numbers or ENDING)}
    try:
        yield
    finally:
        for number, former in before.items():
            if former is not None:  # otherwise C installed it, and Python cannot restore it
                signal.signal(number, former)


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Defer signals until the block ends: a launcher ends the other processes of a job when one has failed."""
    heard: list[int] = []
    handlers = ((number, signal.getsignal(number)) for number in _list_handled(ENDING))
    before = {number: former for number, former in handlers if former is not None}  # otherwise C installed it
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
        for caught in heard:
            signal.raise_signal(caught)


class _Unwinding:
    """A handler that raises outside imports, ends the process before work begins, and otherwise waits."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Time of the signal that waits for the end of an import."""
        self._is_retry = False
        """Whether the next call repeats that signal."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise, wait, or end the process."""
        is_retry, self._is_retry = self._is_retry, False
        can_raise, has_begun = _inspect_stack(frame)
        if not has_begun:
            _end(number)
        if can_raise:
            self._since = None
            raise_as_signal(number)
        if self._since is None:
            self._since = time.monotonic()
            _thread.start_new_thread(self._retry, (number, _thread.get_ident()))  # threading's would take locks
        elif time.monotonic() - self._since > (LONGEST_IMPORT_SECONDS if is_retry else ONE_EVENT_SECONDS):
            _end(number)  # the import hangs, or a second signal arrived

    def _retry(self, number: int, main: int) -> None:
        while self._since is not None:
            time.sleep(SECONDS_BETWEEN_TRIES)
            self._is_retry = signal.getsignal(number) is self
            if not self._is_retry:  # the handler was replaced: the new one gets the signal once
                self._since = None
            signal.pthread_kill(main, number)  # interrupts a system call in which the main thread waits


def _inspect_stack(frame: FrameType | None) -> tuple[bool, bool]:
    """Return whether an exception raised here propagates, and whether work has begun that it would have to undo.

    Imports and ``__del__`` swallow exceptions. Frames of volseg outside imports count as work; a command that is still
    importing has begun none.
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
