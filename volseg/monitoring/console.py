"""The bars of the terminal, and the lines between them: each line stands by itself, whatever bar is open."""

import logging
from typing import Any
from weakref import WeakSet

from tqdm import tqdm

__all__ = ["BesideBars", "close_bars", "open_bar"]

_open: WeakSet[tqdm] = WeakSet()
"""Of the process, as the terminal is."""


def open_bar(*args: Any, **settings: Any) -> tqdm:
    """Return a bar that `close_bars` closes too, where an error leaves it open."""
    bar: tqdm = tqdm(*args, dynamic_ncols=True, **settings)  # type: ignore[call-overload]
    _open.add(bar)
    return bar


def close_bars() -> None:
    """End the line of every open bar, before the last words of a process."""
    for bar in list(_open):
        bar.close()


class BesideBars(logging.StreamHandler):
    """Write each line of the log where bars are redrawn below it, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            with tqdm.external_write_mode(file=self.stream):
                super().emit(record)
        except Exception:  # a log on a full disk: as logging's own handlers do
            self.handleError(record)
