"""Handle SIGINT, SIGTERM and SIGHUP; a command's first statement installs the handlers.

- While modules are imported and no work has begun, a signal ends the process at once, with one line: `end_on_signals`.
- While a command works, a signal raises, so that half-written files and locks are removed: `unwinding_on_signals`. It
  never raises during an import: C code swallows exceptions there (numpy's does), modules stay half imported, and their
  locks stay held. There, too, the process ends at once, and half-written files remain, as after SIGKILL.
- A training records signals and stops between two batches: `volseg.workflow.checks`.

A handler imports nothing and takes no lock. This module is imported before any slow import.
"""

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
"""Signals from Ctrl-C, from a cluster that ends a job, and from a closed terminal."""

INTERRUPTED = tuple(128 + number for number in ENDING)
"""Exit statuses after these signals."""

ONE_EVENT_SECONDS = 2.0
"""Signals closer than this count as one: a launcher forwards signals that the system also sends to its processes."""

LAUNCHING = ("volseg", "volseg.__main__", "volseg.cli", "volseg.experiment", "volseg.importing")
"""Modules whose frames do not count as work; neither do those of the command line (``volseg.cli.*``)."""

RESUME_HINTS = {
    "train": "a training that had begun is saved; continue it with --resume",
    "cross-validate": "a training that had begun is saved; continue it with --resume",
    "search": "finished trials are saved; run the same command again to continue",
    "quickstart": "start again with another --output; a training that had begun is saved: continue it with the command "
    "in the first line",
    "predict": "every written label map is complete; continue with --resume",
}
"""Hints on how to continue after an interruption, by command; other commands must be run again."""


def end_on_signals() -> None:
    """Make signals end this process at once, with one line, except ignored ones. Call it in the main thread."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def use_default_handlers() -> None:
    """Let the system handle SIGTERM and SIGHUP: a process that waits for others in C++ cannot run Python handlers."""
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
    """Return how to continue the command of this command line."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return RESUME_HINTS.get(verb, "run the same command again")


def raise_as_signal(number: int) -> "NoReturn":
    """Raise KeyboardInterrupt for Ctrl-C, and SystemExit with status 128 + n for other signals."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def unwinding_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Make signals raise in the main thread while a command works; restore their handlers afterwards.

    Parameters
    ----------
    *numbers
        Signals; `ENDING` by default. Ignored signals stay ignored.
    """
    before = {number: signal.signal(number, _unwind) for number in _list_handled(numbers or ENDING)}
    try:
        yield
    finally:
        for number, former in before.items():
            if former is not None:  # else C installed it, and Python cannot restore it
                signal.signal(number, former)


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Defer signals until the block ends: a launcher ends the other processes of a job when one has failed."""
    heard: list[int] = []
    handlers = ((number, signal.getsignal(number)) for number in _list_handled(ENDING))
    before = {number: former for number, former in handlers if former is not None}  # None if C installed it
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
        for caught in heard:
            signal.raise_signal(caught)


def _unwind(number: int, frame: FrameType | None) -> None:
    """Raise if work has begun, so that it is undone; end the process at once during imports and before work begins."""
    if not _has_work_to_undo(frame):
        _end(number)
    raise_as_signal(number)


def _has_work_to_undo(frame: FrameType | None) -> bool:
    """Return whether an exception raised here propagates to work that has begun.

    Imports and ``__del__`` swallow exceptions. Frames of volseg outside imports count as work; a command that is still
    importing has begun none.
    """
    has_begun = False
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            return False
        if module.startswith("volseg.") and module not in LAUNCHING and not module.startswith("volseg.cli."):
            has_begun = True
        frame = frame.f_back
    return has_begun
