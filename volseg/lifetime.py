"""How long a launched process lives: no longer than its launcher, and not into the teardown of the interpreter.

It may also begin anew (`begin_anew`): the same process, for whoever started it, with nothing left of what it did.

Needs no torch, so that a process binds itself to its launcher before torch is imported, which takes seconds.
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

__all__ = [
    "ENDED_SILENTLY",
    "begin_anew",
    "bind_copy",
    "call_before_last_words",
    "count_from_beginning",
    "describe_exit",
    "end_at_exit",
    "end_now",
    "end_with_launcher",
    "end_with_parent",
    "is_exit_others",
    "is_running",
    "say_last",
    "shape_last_words",
    "take_age",
]

BEGUN_ANEW = "VOLSEG_BEGUN_ANEW"
"""Variable in which a process that begins anew tells when, in seconds since the machine began: to the system it is as
old as before."""

UNWRITTEN = 120
"""Exit status of Python where what was printed last could not be written, on a full disk say."""

PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""

ENDED_SILENTLY = "the usual cause is a lack of memory (see the system's log), or the owner of the machine ended it"

SECONDS_BETWEEN_LOOKS = 1.0
"""After which a process looks again whether it still has its parent."""

_before_last_words: list[Callable[[], object]] = []

_shape: Callable[[str], str] | None = None


_counts_from_beginning = False


def count_from_beginning() -> None:
    """Say that all this process does is the one piece of work that will ask for its age."""
    global _counts_from_beginning
    _counts_from_beginning = True


def take_age() -> float:
    """Return the seconds since this process began, to who asks first; 0.0 to others.

    0.0 as well where nobody said that it is one piece of work (a notebook is not), or the system does not tell.
    """
    global _counts_from_beginning
    counts, _counts_from_beginning = _counts_from_beginning, False
    if not counts or not sys.platform.startswith("linux"):
        return 0.0
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # the name before may hold anything
    begun = max(ticks / os.sysconf("SC_CLK_TCK"), float(os.environ.get(BEGUN_ANEW, 0)))
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - begun, 0.0)


def end_with_launcher() -> None:
    """Have this process get SIGTERM when the one that started it ends, however that ends.

    A launcher that is killed can tell nobody. Linux tells of the end of the *thread* that started a process: of ours,
    which waits there for what it started. Whatever else starts processes may do so by a thread that goes on to other
    work and ends; then this process looks, once a second, whether it still has that parent.
    """
    parent, launcher = os.getppid(), os.environ.get(OWN_LAUNCHER)
    if launcher == str(parent):
        end_with_parent(parent)
    elif launcher is not None and not is_running(int(launcher)):  # it ended before this process could look
        end_now(128 + signal.SIGTERM)
    else:
        Thread(target=_end_without, args=(parent,), name="volseg-parent", daemon=True).start()


def _end_without(parent: int) -> None:
    """Send SIGTERM to this process once it has another parent than it had."""
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Have the system send SIGTERM to this process when ``parent``, which made it, ends; at once if it has ended.

    For parents that make processes by a thread that lives as long as they do: see ``end_with_launcher``. On other
    systems than Linux nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # before the system was asked
        end_now(128 + signal.SIGTERM)


def bind_copy(parent: int) -> None:
    """Let this process, a fork of ``parent``, end with it, and leave what signals mean to it.

    What the parent does about Ctrl-C and SIGHUP is no matter of its copies, which it ends: one that took a signal for
    a fault of its work went on to wait for more, and the parent for it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in set(ENDING) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent)


def is_running(process: int) -> bool:
    """Tell whether a process of this machine runs; one that has ended and whose status nobody has taken does not."""
    if not sys.platform.startswith("linux"):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's
            return True
        return True
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # it may not be looked at: it is there
        return True


def describe_exit(code: int) -> str:
    """Return how a process ended, by its exit code; negative ones are signals.

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
    """Have ``close`` called before `say_last` writes: it ends a line that is still open."""
    _before_last_words.append(close)


def shape_last_words(shape: Callable[[str], str] | None) -> None:
    """Have `say_last` write ``shape(message)``, for whoever reads the lines of this process; None for the message."""
    global _shape
    _shape = shape


def say_last(message: str) -> None:
    """Write why this process ends, on lines of its own, if standard error can be written."""
    for close in _before_last_words:
        close()
    with suppress(OSError, ValueError):  # a full disk, nobody who reads it any more, or closed
        show(message if _shape is None else _shape(message), err=True)


def end_now(status: int) -> NoReturn:
    """End this process: its output is written, the interpreter is not torn down.

    While it is, threads of C++ that want Python once more (gloo's, torch's) abort the process, which turns any exit
    status into -6.
    """
    _write_out()
    os._exit(status)


def begin_anew(variables: Mapping[str, str]) -> NoReturn:
    """Run the command line of this process again in its place, with some variables of the environment set.

    Whoever started it sees the same process. Its threads end, whatever they wait for, and its memory goes back to the
    system, on a GPU too. Files that libraries keep open would stay open, and with them what a GPU's driver holds for
    this process: all but the three standard streams are closed. Any thread may call this.
    """
    _write_out()
    os.environ.update(variables)
    if sys.platform.startswith("linux"):
        os.environ[BEGUN_ANEW] = str(time.clock_gettime(time.CLOCK_BOOTTIME))
    for descriptor in _list_open_files():
        with suppress(OSError):  # that of the listing itself
            os.set_inheritable(descriptor, False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _list_open_files() -> list[int]:
    """Return the open files that are no standard stream; none where the system does not say."""
    try:
        return [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if descriptor > 2]
    except OSError:
        return []


def _write_out() -> bool:
    """Write what is buffered; return False if the output is lost that somebody wanted. A log is no result."""
    logging.shutdown()
    written = True
    for stream in filter(None, (sys.stderr, sys.stdout)):  # None where the process was started without one
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):  # nobody reads it any more, or it is closed
            pass
        except OSError:
            written = stream is not sys.stdout
    return written


def is_exit_others() -> bool:
    """Say whether somebody has registered for this process's exit before us: what measures it from without, say.

    What was registered first runs last, behind `end_at_exit`'s, and would not run at all.
    """
    return atexit._ncallbacks() > 1  # logging's, which `end_now` runs


def end_at_exit() -> "Ending":
    """Let this process end by `end_now` when Python has waited for its threads and run what was left for the exit.

    To be called early, as what was registered first runs last.

    Returns
    -------
    Ending
        To be told the exit status; without one Python ends as ever.
    """
    ending = Ending()
    atexit.register(ending)
    return ending


class Ending:
    """The exit status that is known before the exit."""

    status: int | None = None

    def __call__(self) -> None:
        """End the process if its status is known."""
        if self.status is not None:
            written = _write_out()
            end_now(self.status or (0 if written else UNWRITTEN))
