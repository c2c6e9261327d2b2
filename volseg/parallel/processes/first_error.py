"""First error of a job: the process that failed reports it once; the others end after it."""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from volseg.errors import (
    BatchFieldError,
    ConfigError,
    DataError,
    GridError,
    NonFiniteLossError,
    ParallelError,
    UnsupportedOperatorError,
    VolsegError,
)
from volseg.launched import OWN_ATTEMPTS, OWN_LAUNCHER, read_launch
from volseg.lifetime import ENDED_SILENTLY, begin_anew, describe_exit, end_now, say_last
from volseg.parallel.devices import name_own_place
from volseg.parallel.processes.supervision import Cause, Supervision

SECONDS_FOR_THE_CAUSE = 6.0
"""Seconds for the failing process to report its error, when this process knows only that another one is gone."""

LASTING = (BatchFieldError, ConfigError, DataError, GridError, NonFiniteLossError, UnsupportedOperatorError)
"""Errors that would occur again in another attempt, which starts from the same files. A restart must also not turn a
refusal into consent: attempts after the first continue with the content of the run folder."""

SECONDS_FOR_REPORTS = 2.0
"""Seconds for a status to be written before this process ends."""

_reports: list[Callable[[str], object]] = []

SECONDS_FOR_STACKS = 3.0
"""Seconds for every process to print its stack: the first one that ends stops the others."""


def end_after(fault: BaseException, supervision: Supervision | None) -> NoReturn:
    """End this launched process after an uncaught error; report the job's first error and name the others.

    Parameters
    ----------
    fault
        The error.
    supervision
        Supervision of this process, which informs the others; None before the rendezvous.
    """
    fault = await_first_error(fault, supervision)
    said, is_ours = describe(fault), isinstance(fault, VolsegError)
    message = f"{name_own_place()}: {said}" + ("" if is_ours else " (see its traceback)")
    lasts = isinstance(fault, LASTING)
    if supervision is None:
        cause = Cause(message=message, is_own=True, lasts=lasts)
    else:
        cause = supervision.fail(message, lasts=lasts)
    if not cause.is_own:
        if cause.again and supervision is not None:
            supervision.part()
        end_by(cause, also=said)
    trace = "".join(traceback.format_exception(fault))
    if not is_ours:
        say_last(trace.rstrip("\n"))
    if not (is_ours and OWN_LAUNCHER in os.environ and read_launch() is not None):  # volseg's own launcher tells it
        say_last(f"volseg: {message}")
    write_cause(message, trace, lasts=lasts)
    end_now(1)


def await_first_error(fault: BaseException, supervision: Supervision | None) -> BaseException:
    """Return the error that ends the job; ``fault`` may say only that another process is gone.

    In that case another process failed first. Supervision ends this process as soon as it knows that process, so this
    function returns only after a long wait.
    """
    if supervision is None or not is_peer_gone(fault):
        return fault
    time.sleep(SECONDS_FOR_THE_CAUSE)
    gone = " and ".join(supervision.list_silent(SECONDS_FOR_THE_CAUSE / 2))
    if not gone:
        return fault
    return ParallelError(
        f"{gone} sends no heartbeat and its connections broke; {ENDED_SILENTLY} ({_shorten(str(fault))})"
    )


@contextmanager
def reporting_first_error(report: Callable[[str], object]) -> Iterator[None]:
    """Call ``report`` with the error that ends the job, if the job ends within the block.

    A thread calls ``report``, as the main thread may hang anywhere; this process waits for it only briefly.
    """
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


def begin_all_anew(message: str, supervision: Supervision, variables: Mapping[str, str]) -> NoReturn:
    """Restart all processes in place after a failure that the job survives with other settings.

    If another process failed first, its failure decides.

    Parameters
    ----------
    message
        What failed.
    supervision
        Supervision of this process, which informs the others: they may be waiting for it in a collective.
    variables
        Environment variables that pass the failure to the restarted process.
    """
    cause = supervision.fail(f"{name_own_place()}: {message}", again=True)
    if not cause.again:
        end_by(cause, also=message)
    supervision.part()
    begin_anew({OWN_ATTEMPTS: _count_attempt(), **(variables if cause.is_own else {})})


def _count_attempt() -> str:
    """Return how often these processes have been started, including this time, if launchers count."""
    return str(int(os.environ.get(OWN_ATTEMPTS, "0")) + 1)


def end_by(cause: Cause, stack: str = "", also: str = "") -> NoReturn:
    """End or restart this process for a failure of another one.

    Parameters
    ----------
    cause
        Cause of the job's end.
    stack
        Stack of this process's main thread, if it matters.
    also
        This process's own error, which is usually a consequence.
    """
    if cause.again:
        say_last(f"volseg: {name_own_place()} restarts with the others, after {_shorten(cause.message)}")
        begin_anew({OWN_ATTEMPTS: _count_attempt()})
    for report in _reports:
        reporting = threading.Thread(target=report, args=(cause.message,), name="volseg first error", daemon=True)
        reporting.start()
        reporting.join(SECONDS_FOR_REPORTS)
    if cause.is_own:
        say_last(f"volseg: {cause.message}")
    else:
        met = f"; here: {_shorten(also)}" if also and also not in cause.message else ""
        say_last(f"volseg: {name_own_place()} ends with the others, after {_shorten(cause.message)}{met}")
    if stack:
        say_last(f"stack of {name_own_place()}:\n{stack}")
    # The launcher reads the error file of the process that ended first: all processes write the same error.
    write_cause(cause.message, lasts=cause.lasts)
    if stack:
        time.sleep(SECONDS_FOR_STACKS)
    end_now(1)


def is_peer_gone(fault: BaseException) -> bool:
    """Return whether an error only says that another process is gone: a broken connection."""
    if isinstance(fault, ParallelError) and isinstance(fault.__cause__, RuntimeError):
        return is_peer_gone(fault.__cause__)
    if isinstance(fault, dist.DistNetworkError):
        return True
    if isinstance(fault, dist.DistBackendError):
        return "remote process exited" in str(fault) or "Connection" in str(fault)
    # gloo raises plain errors, whose messages begin with the source file.
    return type(fault) is RuntimeError and "gloo/transport/" in str(fault)


def describe(fault: BaseException) -> str:
    """Return the message of a volseg error; prefix other errors with their type."""
    return str(fault) if isinstance(fault, VolsegError) else f"{type(fault).__name__}: {fault}"


def write_cause(message: str, callstack: str = "", *, lasts: bool = False) -> None:
    """Write the elastic launcher's error file, in the format of torch's ``ErrorHandler``, if one is requested."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time.time())), "lasts": lasts}
    with open(file, "w", encoding="utf-8") as written:
        json.dump({"message": {"message": message, "extraInfo": extra}}, written)


def read_cause(failure: ProcessFailure, place: str) -> str:
    """Return the cause of death of a process of the elastic launcher.

    Parameters
    ----------
    failure
        The launcher's record.
    place
        Description of that process, in case it wrote no error.
    """
    told = _read_told(failure)
    if "message" in told:
        return str(told["message"])
    words = f"{place} {describe_exit(failure.exitcode)}"
    return words if failure.exitcode == -signal.SIGKILL else f"{words}; its own output above has the details"


def is_lasting(failure: ProcessFailure) -> bool:
    """Return whether a process of the elastic launcher failed for a lasting cause."""
    return bool(_read_told(failure).get("extraInfo", {}).get("lasts"))


def _read_told(failure: ProcessFailure) -> Mapping[str, Any]:
    told: Any = failure.error_file_data.get("message")
    return told if isinstance(told, dict) else {}


def _shorten(message: str) -> str:
    first, _, more = message.partition("\n")
    return first + (" ..." if more else "")
