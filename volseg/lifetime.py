"""End a launched process together with its launcher, and before the interpreter's teardown.

A process may also restart in place (`begin_anew`): its parent sees the same process, and no state remains. This module
does not need torch, so that a process binds itself to its launcher before it imports torch, which takes seconds.
"""

import atexit
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import NoReturn

from volseg.launched import OWN_LAUNCHER
from volseg.signals import ENDING
from volseg.streams import show

UNWRITTEN = 120
"""Exit status of Python if its last output could not be written, for example to a full disk."""

PR_SET_PDEATHSIG = 1
"""Constant of Linux's ``prctl``."""

ENDED_SILENTLY = "the usual cause is a lack of memory (see the system's log); someone may also have killed it"

SECONDS_BETWEEN_LOOKS = 1.0
"""Interval at which a process checks whether its parent still exists."""

_before_last_words: list[Callable[[], object]] = []

_shape: Callable[[str], str] | None = None


def end_with_launcher() -> None:
    """Make this process receive SIGTERM when its launcher ends for any reason.

    A killed launcher cannot signal its processes. Linux signals the end of the *thread* that started a process:
    volseg's own thread waits for the processes that it started. Another program may start processes from a thread that
    ends earlier; this process then checks its parent once a second.
    """
    parent, launcher = os.getppid(), os.environ.get(OWN_LAUNCHER)
    if launcher == str(parent):
        end_with_parent(parent)
    elif launcher is not None and not is_running(int(launcher)):  # the parent ended before this call
        end_now(128 + signal.SIGTERM)
    else:
        Thread(target=_end_without, args=(parent,), name="volseg-parent", daemon=True).start()


def _end_without(parent: int) -> None:
    """Send SIGTERM to this process once its parent has changed."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Make the system send SIGTERM to this process when its ``parent`` ends, or at once if the parent has ended.

    This requires that the parent starts processes from a thread that lives as long as the parent: see
    ``end_with_launcher``.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        end_now(128 + signal.SIGTERM)


def bind_copy(parent: int) -> None:
    """End this fork with its ``parent``, and restore the default signal handlers.

    Copies must not inherit the parent's handling of Ctrl-C and SIGHUP, since the parent ends its copies. A copy that
    treated a signal as an error of its work continued to wait for more, and the parent waited for the copy.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in set(ENDING) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent)


def is_running(process: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no permission to inspect it, so it exists
        return True


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its exit code; negative codes are signals.

    Examples
    --------
    >>> describe_exit(2), describe_exit(-15)
    ('failed with exit code 2', 'was ended by SIGTERM')
    """
    if code >= 0:
        return f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        return f"was killed by SIGKILL: {ENDED_SILENTLY}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def call_before_last_words(close: Callable[[], object]) -> None:
    """Call ``close`` before `say_last` writes, to end an open line."""
    _before_last_words.append(close)


def shape_last_words(shape: Callable[[str], str] | None) -> None:
    """Make `say_last` write ``shape(message)``, for programs that parse the output; None restores the plain message."""
    global _shape
    _shape = shape


def say_last(message: str) -> None:
    """Write the reason why this process ends to standard error, on separate lines, if possible."""
    for close in _before_last_words:
        close()
    with suppress(OSError, ValueError):  # a full disk, a broken pipe, or a closed stream
        show(message if _shape is None else _shape(message), err=True)


def end_now(status: int) -> NoReturn:
    """Flush the output and end this process without the interpreter's teardown.

    During the teardown, C++ threads that call Python (gloo's, torch's) abort the process, which changes any exit status
    to -6.
    """
    _write_out()
    os._exit(status)


def begin_anew(variables: Mapping[str, str]) -> NoReturn:
    """Restart the command line of this process in place, with additional environment variables.

    The parent sees the same process. All threads end, even while waiting, and memory is freed, also on a GPU. Files
    that libraries keep open would stay open, and with them the GPU driver's allocations for this process, so all files
    except the three standard streams are closed. Any thread may call this function.
    """
    _write_out()
    os.environ.update(variables)
    with suppress(OSError):  # too many open files to open the listing
        for descriptor in [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]:
            with suppress(OSError):  # the descriptor of the listing itself
                os.set_inheritable(descriptor, False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _write_out() -> bool:
    """Flush the standard streams; return False if standard output was lost."""
    logging.shutdown()
    written = True
    for stream in filter(None, (sys.stderr, sys.stdout)):  # None if the process was started without the stream
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):  # the reader is gone, or the stream is closed
            pass
        except OSError:
            written = stream is not sys.stdout
    return written


def is_exit_others() -> bool:
    """Return whether an exit handler was registered before volseg's, for example a profiler's.

    Handlers run in reverse order. A handler registered earlier would run after `end_at_exit`'s, that is, never.
    """
    return atexit._ncallbacks() > 1  # one is logging's, which `end_now` runs


def end_at_exit() -> "Ending":
    """End this process with `end_now` after Python has joined its threads and run the other exit handlers.

    Call it early, since handlers run in reverse order.

    Returns
    -------
    Ending
        Object to set the exit status on; without a status, Python ends as usual.
    """
    ending = Ending()
    atexit.register(ending)
    return ending


class Ending:
    """Exit handler with the exit status of the process, which is set before the exit."""

    status: int | None = None

    def __call__(self) -> None:
        """End the process if its status is set."""
        if self.status is not None:
            written = _write_out()
            end_now(self.status or (0 if written else UNWRITTEN))
