"""The bars of the terminal, and the lines between them: each line stands by itself, whatever bar is open."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from tqdm import tqdm

from volseg.lifetime import call_before_last_words

__all__ = ["BesideBars", "close_bars", "open_bar"]

logger = logging.getLogger(__name__)

_open: WeakSet[tqdm] = WeakSet()
"""Of the process, as the terminal is."""


class _Stream:
    """Where bars are drawn: standard error, and nowhere from the moment on in which that cannot be written.

    A full disk under a log, or a terminal that is gone, is no reason to end a training.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr  # None where a process was started without one
        self._is_lost = self._stream is None

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda: self._stream.flush())

    def _attempt(self, act: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except (OSError, ValueError) as fault:  # a closed file is a ValueError
            self._is_lost = True
            with suppress(ValueError):  # raised by logging itself where its lines go to the closed stream too
                logger.warning("progress is no longer shown: %s", fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Terminal:
    """Where lines are written, as tqdm compares it with the streams of the open bars: equal to each on it.

    The bars' own streams must not be equal to standard error: tqdm would flush that, and standard output, past the
    guard of `_Stream` whenever a bar is opened.
    """

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __eq__(self, other: object) -> bool:
        return other is self._stream or (isinstance(other, _Stream) and other._stream is self._stream)

    def __hash__(self) -> int:
        return hash(self._stream)


def open_bar(*args: Any, **settings: Any) -> tqdm:
    """Return a bar that `close_bars` closes too, where an error leaves it open."""
    bar: tqdm = tqdm(*args, file=_Stream(), dynamic_ncols=True, **settings)  # type: ignore[call-overload]
    _open.add(bar)
    return bar


def close_bars() -> None:
    """End the line of every open bar, before the last words of a process."""
    for bar in list(_open):
        bar.close()


call_before_last_words(close_bars)


class BesideBars(logging.StreamHandler):
    """Write each line of the log where bars are redrawn below it, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            with tqdm.external_write_mode(file=_Terminal(self.stream)):  # type: ignore[arg-type]  # is only compared
                super().emit(record)
        except Exception:  # a log on a full disk: as logging's own handlers do
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Say on standard error why a line could not be written, unless that is closed: logging raises then."""
        with suppress(ValueError):
            super().handleError(record)
