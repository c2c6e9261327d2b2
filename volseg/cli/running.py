"""Run the command line in this process; handle signals, the last message and the exit status.

Errors that volseg raises on purpose, and system errors (a full disk), are printed as one message without a traceback;
the exit status is 1. Ctrl-C ends with 130, SIGTERM with 143, SIGHUP with 129 (`volseg.signals`).
"""

import logging
import os
import signal
import sys
import warnings
from typing import Annotated, NoReturn

import typer
from typer import Option

from volseg.cli.data import data_app
from volseg.cli.options import JsonLogs, PlainGroup, Quiet
from volseg.cli.prediction import prediction_app
from volseg.cli.tools import start_app, tools_app
from volseg.cli.training import training_app
from volseg.errors import VolsegError
from volseg.files import require_text
from volseg.launched import OWN_LAUNCHER, Launch, read_launch
from volseg.lifetime import end_at_exit, end_with_launcher, is_exit_others, say_last
from volseg.monitoring.console import add_to_logs, are_logs_json, close_bars, set_up_logs
from volseg.signals import INTERRUPTED, describe_resume, unwinding_on_signals, use_default_handlers
from volseg.streams import guard_streams, make_printable, show
from volseg.version import __version__

app = typer.Typer(
    name="volseg",
    cls=PlainGroup,
    help="Train 3D medical segmentation networks; several GPUs behave as one large one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(start_app)
app.add_typer(data_app, rich_help_panel="Data")
for verbs in (training_app, prediction_app, tools_app):  # panels keep this order
    app.add_typer(verbs)  # without a name: its verbs are those of the program


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"volseg {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Print version.")] = False,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Define the options before a verb."""


FOREIGN = (
    # torch 2.13 renames these collectives, but still calls the old names (in its device mesh, in DDP).
    (r"`torch\.distributed\.(_\w+|all_gather_into_tensor|reduce_scatter_tensor)` is", r"torch\."),
    # torch reads the names of GPUs from an old package if it is installed.
    (r"The pynvml package is deprecated", r"torch\.cuda"),
    # MONAI imports torch.cuda.amp, whose names moved to torch.amp.
    (r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated", r"monai\."),
)
"""Hidden FutureWarnings by message and module: each is between two libraries; the comment above states its reason."""

WRONG_COMMAND: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's ``UsageError``, from the module that the installed typer uses."""


def run_to_end() -> NoReturn:
    """Run the command line, then end this process.

    The interpreter's teardown is skipped: it takes a second or more, while the parent process waits, and the system
    frees everything anyway. It runs if an exit handler was registered earlier, by a profiler or a coverage
    measurement.
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
    guard_streams()
    launch = read_launch()
    if launch is not None or OWN_LAUNCHER in os.environ:
        end_with_launcher()
    set_up_logs()
    if "--json-logs" in sys.argv[1:]:  # before parsing, which may fail
        add_to_logs("json")
    _keep_foreign_warnings_back()
    logging.getLogger("highdicom").setLevel(logging.WARNING)  # it logs every header module that it copies
    if launch is not None:
        _run_launched(launch)
    try:
        with unwinding_on_signals():
            _run_verb()
    except VolsegError as fault:
        _say(f"volseg: {fault}", typer.colors.RED)
        sys.exit(1)
    except OSError as fault:  # a full disk, or a folder that is not writable
        _say(f"volseg: {_describe_refusal(fault)}", typer.colors.RED)
        sys.exit(1)
    except SystemExit as end:  # typer turns Ctrl-C into SystemExit
        if end.code in INTERRUPTED:
            _say(f"volseg: interrupted; {describe_resume()}")
        raise


def _run_verb() -> None:
    """Run the verb; with JSON logs, errors of the command line are JSON too."""
    for argument in sys.argv[1:]:
        require_text(argument, "a command-line argument")
    if not are_logs_json():
        app()
        return
    try:
        status = app(standalone_mode=False)
    except WRONG_COMMAND as fault:
        say_last(f"volseg: {fault.format_message()}")  # type: ignore[attr-defined]  # a method of every UsageError
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _keep_foreign_warnings_back() -> None:
    """Hide warnings between two libraries, which the user cannot act on."""
    for message, module in FOREIGN:
        warnings.filterwarnings("ignore", message, FutureWarning, module)


def _say(words: str, colour: str | None = None) -> None:
    """Print the last message of the process on its own line."""
    if are_logs_json():
        say_last(words)
        return
    close_bars()
    typer.secho(make_printable(words), fg=colour, err=True)


def _run_launched(launch: Launch) -> NoReturn:
    """Run the command line as one process of a job; the processes end together and report an error once."""
    ending = end_at_exit()
    use_default_handlers()
    try:
        with unwinding_on_signals(signal.SIGINT):
            _run_verb()
        status = 0
    except SystemExit as end:
        if end.code in INTERRUPTED and launch.rank == 0:
            _say(f"volseg: interrupted; {describe_resume()}")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as fault:
        from volseg.parallel.processes.first_error import end_after  # imports torch: not for --help
        from volseg.parallel.processes.group import get_supervision

        # An error of the operating system needs no traceback.
        said = VolsegError(_describe_refusal(fault)) if isinstance(fault, OSError) else fault
        end_after(said, get_supervision())
    if "torch" in sys.modules:
        from volseg.parallel.processes.group import stop_watching  # imports torch: not for --help

        stop_watching()
    ending.status = status
    sys.exit(status)


def _describe_refusal(fault: OSError) -> str:
    where = "" if fault.filename is None else f"{fault.filename}: "
    return f"{where}{fault.strerror or fault}; free space, or name another folder; {describe_resume()}"
