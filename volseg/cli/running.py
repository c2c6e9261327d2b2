"""The process around a verb: what signals do to it, its last words and exit status, alone or among others.

What volseg raises on purpose is printed as one message without a traceback, with exit status 1, and so is what the
system refuses (a full disk); Ctrl-C ends with 130, SIGTERM with 143, SIGHUP with 129.
"""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from volseg.cli.root import app
from volseg.errors import VolsegError
from volseg.files import require_text
from volseg.launched import OWN_LAUNCHER, Launch, find_launch
from volseg.lifetime import count_from_beginning, end_at_exit, end_with_launcher, is_exit_others, say_last
from volseg.monitoring.console import add_to_logs, are_logs_json, close_bars, set_up_logs

__all__ = ["main", "run_to_end"]

ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""What clusters end jobs with, and closed terminals; Python itself takes care of Ctrl-C."""

INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, *ENDING))
"""Exit statuses."""

FOREIGN = (
    # torch 2.13 renames these collectives, and calls them by their old names itself (in its device mesh, in DDP).
    (r"`torch\.distributed\.(_\w+|all_gather_into_tensor|reduce_scatter_tensor)` is", r"torch\."),
    # torch asks an old package for the names of GPUs where somebody has it installed.
    (r"The pynvml package is deprecated", r"torch\.cuda"),
    # MONAI imports torch.cuda.amp, whose names moved to torch.amp.
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", r"monai\."),
)
"""FutureWarnings that are not shown, by message and module: each between two libraries, with its reason above."""

_word_as_python = warnings.formatwarning

WRONG_COMMAND: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's ``UsageError``, from wherever the installed typer has it."""

WAYS_ON = {
    "train": "a training that had begun is saved, go on with it by --resume",
    "cross-validate": "a training that had begun is saved, go on with it by --resume",
    "quickstart": "begin anew with another --output; a training that had begun is saved, go on with it by the command "
    "in the first line",
    "predict": "the label maps that are written are whole, go on with the others by --resume",
}
"""What to do by verb, after an interruption or a refusal of the system; the other verbs are begun again."""


@contextmanager
def _leaving_nothing_half_done() -> Iterator[None]:
    """Let the signals that end jobs unwind as Ctrl-C does: half-written files and locks are removed.

    Not in a process that a launcher started: waiting for the others in C++ it could not unwind.
    """

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    if find_launch() is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup ignores SIGHUP
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_end() -> NoReturn:
    """Run the command line as this process, which ends with it.

    Without the interpreter's teardown: of all that was imported it takes a second or more, in which whoever started
    this process waits, and gives back nothing that the system does not. With it where others have registered for the
    exit before, a profiler or a measurement of coverage.
    """
    if is_exit_others():
        main()
        sys.exit(0)
    ending = end_at_exit()
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    if isinstance(status, str):
        say_last(status)
    ending.status = status if isinstance(status, int) else int(status is not None)
    sys.exit(ending.status)


def main() -> None:
    """Run the command line."""
    count_from_beginning()
    launch = find_launch()
    if launch is not None or OWN_LAUNCHER in os.environ:
        end_with_launcher()
    _print_anything()
    set_up_logs()
    if "--json-logs" in sys.argv[1:]:  # before the command line is read, which may be wrong
        add_to_logs("json")
    _keep_foreign_warnings_back()
    logging.getLogger("highdicom").setLevel(logging.WARNING)  # it tells of every module of a header that it copies
    if launch is not None:
        _run_launched(launch)
    try:
        with _leaving_nothing_half_done():
            _run_verb()
    except VolsegError as fault:
        _say(f"volseg: {fault}", typer.colors.RED)
        sys.exit(1)
    except OSError as fault:  # a full disk, a folder that may not be written
        _say(f"volseg: {_describe_refusal(fault)}", typer.colors.RED)
        sys.exit(1)
    except SystemExit as end:  # typer turns Ctrl-C into this one
        if end.code in INTERRUPTED:
            _say(f"volseg: interrupted; {_find_way_on()}")
        raise


def _print_anything() -> None:
    """Escape what standard output and standard error cannot encode, such as a name that is no UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run_verb() -> None:
    """Run what the command line says; where logs are JSON, so is what is wrong with the command line."""
    for argument in sys.argv[1:]:
        require_text(argument, "a word of the command line")
    if not are_logs_json():
        app()
        return
    try:
        status = app(standalone_mode=False)
    except WRONG_COMMAND as fault:
        say_last(f"volseg: {fault.format_message()}")  # type: ignore[attr-defined]  # of every such exception
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _keep_foreign_warnings_back() -> None:
    """Hide warnings that libraries give each other, about which nobody who trains can do anything."""
    for message, module in FOREIGN:
        warnings.filterwarnings("ignore", message, FutureWarning, module)
    warnings.formatwarning = _word_warning


def _word_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning about a config without the line of pydantic that called for it: no line of theirs is meant."""
    if issubclass(category, FutureWarning) and "pydantic" in Path(filename).parts:
        return f"volseg: {message}"
    return _word_as_python(message, category, filename, lineno, line)


def _say(words: str, colour: str | None = None) -> None:
    """Print the last words of the process, on a line of their own."""
    if are_logs_json():
        say_last(words)
        return
    close_bars()
    typer.secho(words, fg=colour, err=True)


def _find_way_on() -> str:
    """Return how what the command line asked for is gone on with."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return WAYS_ON.get(verb, "run the same command again")


def _run_launched(launch: Launch) -> NoReturn:
    """Run the command line as one of the processes of a job, which end together and tell what happened once."""
    ending = end_at_exit()
    try:
        _run_verb()
        status = 0
    except SystemExit as end:
        if end.code in INTERRUPTED and launch.rank == 0:
            _say(f"volseg: interrupted; {_find_way_on()}")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as fault:
        from volseg.parallel.failures import end_after  # imports torch: not for --help
        from volseg.parallel.processes import find_supervision

        # The system's refusals are no fault of ours that a traceback would help with.
        said = VolsegError(_describe_refusal(fault)) if isinstance(fault, OSError) else fault
        end_after(said, find_supervision())
    if "torch" in sys.modules:
        from volseg.parallel.processes import stop_watching  # imports torch: not for --help

        stop_watching()
    ending.status = status
    sys.exit(status)


def _describe_refusal(fault: OSError) -> str:
    where = "" if fault.filename is None else f"{fault.filename}: "
    return f"{where}{fault.strerror or fault}; free space, or name another folder; {_find_way_on()}"
