"""The bars of the terminal, and the lines between them: each line stands by itself, whatever bar is open."""

import logging
import sys
from collections.abc import Callable
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
            logger.warning("progress is no longer shown: %s", fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._stream  # so that tqdm sees that lines and bars share a terminal

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
            with tqdm.external_write_mode(file=self.stream):
                super().emit(record)
        except Exception:  # a log on a full disk: as logging's own handlers do
            self.handleError(record)
