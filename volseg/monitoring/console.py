"""Show progress bars on a terminal, and the lines of the log above them.

Bars are drawn only on a terminal. In the log of a cluster or of CI, each redrawing would add a line, so a training logs
one line per epoch instead. For scripts, ``--json-logs`` writes every line as JSON, and ``--quiet`` only warnings.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from volseg.files import replace_nan
from volseg.lifetime import call_before_last_words, shape_last_words
from volseg.streams import make_printable

logger = logging.getLogger(__name__)

Form = Literal["text", "json", "quiet"]

LOGS = "VOLSEG_LOGS"
"""Environment variable: ``text``, ``json``, ``quiet`` or ``json,quiet``, for a command's own process and the processes
that it starts."""

FIELDS = "fields"
"""Attribute of a log record with additional fields for its line of JSON: ``extra={FIELDS: {...}}``."""

REDRAWN_PER_SECOND = 1
"""Each redrawing takes a millisecond of the host."""


class _Stream:
    """Stream of the bars: standard error, without its errors.

    A full disk under a log, or a closed terminal, must not end a training.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # None if the process was started without it

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a closed file is a ValueError
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Terminal(Console):
    """Standard error for rich, with a visible cursor: a killed process could not restore a hidden one."""

    def show_cursor(self, show: bool = True) -> bool:
        del show
        return False


_lock = threading.Lock()

_forms: frozenset[Form] = frozenset(("text",))

_display: Progress | None = None
"""Display of the open bars of the process, one below the other; a thread redraws them while a bar is open."""


def _add_bar(**settings: Any) -> tuple[Progress, TaskID] | None:
    """Show another bar, if bars are shown."""
    global _display
    if not shows_bars():
        return None
    with _lock:
        if _display is None:
            _display = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[told]}"),
                console=_Terminal(file=_Stream(), highlight=False),  # type: ignore[arg-type]  # all that rich uses
                refresh_per_second=REDRAWN_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            _display.start()
        return _display, _display.add_task(**settings)


def _end_display(display: Progress) -> None:
    """End the display when its last bar is closed; the bars stay on the screen."""
    global _display
    with _lock:
        if _display is display and display.finished:
            _display = None
            display.stop()


class Bar:
    """Count progress and draw it on a terminal; `close_bars` closes bars that an error leaves open.

    Parameters
    ----------
    title : str
        Title of the bar.
    total : int, optional
        Number of items; None if unknown.
    done : int
        Number of items already done.
    unit : str
        Unit of the items; ``B`` for bytes, which are shown in MiB.
    """

    def __init__(self, title: str, total: int | None = None, *, done: int = 0, unit: str = "case") -> None:
        self.title, self.total, self.done, self._unit = title, total, done, unit
        self._place = _add_bar(description=title, total=total, completed=done, count=self._describe(), told="")
        _open.add(self)

    def advance(self, count: int = 1) -> None:
        """Count further items."""
        self.set(self.done + count)

    def set(self, done: int, **changes: Any) -> None:
        """Set the number of items done; ``told`` is a text after the bar, ``total`` and ``title`` are new values."""
        self.done = done
        self.total = changes.pop("total", self.total)
        if "title" in changes:
            self.title = changes["description"] = changes.pop("title")
        if self._place is not None:
            shown, task = self._place
            if done < shown.tasks[task].completed:  # started again
                shown.reset(task, total=self.total)
            shown.update(task, completed=done, total=self.total, count=self._describe(), **changes)

    def close(self) -> None:
        """Leave the bar on the screen; a second call does nothing."""
        _open.discard(self)
        if self._place is not None:
            (shown, task), self._place = self._place, None
            # Work that stopped before its total has ended too; the bar shows how far it came.
            shown.update(
                task, total=max(self.done, 1), completed=max(self.done, 1), count=self._describe(), refresh=True
            )
            _end_display(shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _describe(self) -> str:
        if self._unit == "B":
            total = "" if self.total is None else f"/{self.total / 2**20:.1f}"
            return f"{self.done / 2**20:.1f}{total} MiB"
        return f"{self.done}{'' if self.total is None else f'/{self.total}'} {self._unit}"


_open: set[Bar] = set()


def close_bars() -> None:
    """Close every open bar, before the last message of a process."""
    for bar in list(_open):
        bar.close()


call_before_last_words(close_bars)


def are_logs_json() -> bool:
    """Return whether every line is a JSON object."""
    return "json" in _forms


def shows_bars() -> bool:
    """Return whether bars are drawn: on a terminal that can move its cursor, unless another form is set."""
    return _forms == {"text"} and os.environ.get("TERM") != "dumb" and _Stream().isatty()


class BesideBars(logging.StreamHandler):
    """Write each line of the log above the bars, on standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a line, without control characters."""
        return make_printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        shown = _display
        try:
            if shown is None:
                super().emit(record)
            else:
                shown.console.print(Text(self.format(record)), soft_wrap=True)
        except Exception:  # such as a log on a full disk: the same as in logging's handlers
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Report on standard error why a line could not be written; do nothing if standard error is closed."""
        with suppress(ValueError):
            super().handleError(record)


class _JsonLine(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        fields = getattr(record, FIELDS, {})
        return json.dumps(replace_nan({**told, **fields}), default=str)


def set_up_logs(form: str | None = None) -> None:
    """Set up the logs of this process and of those that it starts; call it in a program's first lines.

    Parameters
    ----------
    form : str, optional
        ``text``, ``json`` (a JSON object for each line, and for each epoch) or ``quiet`` (only warnings and errors),
        ``json,quiet`` for both; default ``$VOLSEG_LOGS``, else ``text``. An unknown form gives a warning.
    """
    global _forms
    wanted = form or os.environ.get(LOGS) or "text"
    known: Mapping[str, Form] = {one: one for one in get_args(Form)}
    words = [word.strip() for word in wanted.split(",")]
    strange = not {*words} <= known.keys()
    forms: frozenset[Form] = frozenset(() if strange else (known[word] for word in words)) - {"text"}
    _forms = forms or frozenset(("text",))
    os.environ[LOGS] = ",".join(sorted(_forms))
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, BesideBars)]:  # an option overrides the variable
        root.removeHandler(handler)
    if not root.handlers:  # else the program has set up its log, as by logging.basicConfig
        handler = BesideBars()
        handler.setFormatter(_JsonLine() if are_logs_json() else logging.Formatter("%(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.WARNING if "quiet" in _forms else logging.INFO)
        logging.captureWarnings(True)
    shape_last_words(_shape_as_json if are_logs_json() else None)
    if are_logs_json():
        sys.excepthook = _log_fault
    elif sys.excepthook is _log_fault:
        sys.excepthook = sys.__excepthook__
    if strange:
        logger.warning("%s must be %s, %s, %s or json,quiet, got %r; using text", LOGS, *known, wanted)


def add_to_logs(form: Form) -> None:
    """Add a form to those in use, for a further option."""
    set_up_logs(",".join({*_forms, form}))


def _log_fault(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    """Log an unexpected error as one line, with its traceback."""
    logging.getLogger("volseg").critical("%s: %s", kind.__name__, fault, exc_info=(kind, fault, trace))


def _shape_as_json(words: str) -> str:
    record = logging.LogRecord("volseg", logging.ERROR, __file__, 0, words, None, None)
    return _JsonLine().format(record)
