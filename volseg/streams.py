r"""Restrict the standard streams to printable text, and let work continue if a stream breaks.

Names of labels, cases and files are external input. Control characters in them could move the cursor, hide lines or set
the title of a terminal. They are printed as escapes such as ``\u001b``, which JSON reads as the same character.
"""

import errno
import io
import os
import re
import sys
from typing import Any

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators, and marks of the writing direction
    "\ud800-\udfff]"  # surrogates, from names of files that are not UTF-8
)


def make_printable(text: str) -> str:
    r"""Return a text with its control characters written as escapes.

    Examples
    --------
    >>> make_printable("liver\x1b[2J")
    'liver\\u001b[2J'
    """
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def show(words: object, *, err: bool = False) -> None:
    """Print lines, without control characters.

    Parameters
    ----------
    words
        Object to print as text.
    err
        Print to standard error.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # the process was started without one
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = make_printable(str(words)).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(f"{text}\n")
    stream.flush()


def guard_streams() -> None:
    """Let this process continue if the reader of its output is gone, or the disk of its log is full.

    The exit status then depends only on the work. A full disk under standard output is still an error: the command was
    run for that output.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")  # names may contain characters that the encoding lacks
        if stream is not getattr(sys, f"__{name}__"):
            continue  # replaced by a library or a test
        is_buffered = isinstance(stream.buffer, io.BufferedIOBase)  # not with python -u
        stream.flush()
        raw = _Guarded(stream.fileno(), is_log=name == "stderr")
        guarded = io.TextIOWrapper(
            io.BufferedWriter(raw) if is_buffered else raw,  # type: ignore[arg-type]  # as Python does itself
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, guarded)


class _Guarded(io.FileIO):
    """A stream that drops its text if its reader is gone.

    Parameters
    ----------
    descriptor : int
        Open file; it is not closed.
    is_log : bool
        Drop the text after any error.
    """

    def __init__(self, descriptor: int, *, is_log: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_log = is_log
        self._is_terminal = os.isatty(descriptor)

    def write(self, content: Any, /) -> int:
        """Write, or drop the content; return its size."""
        try:
            return super().write(content)
        except OSError as fault:
            is_gone = fault.errno == errno.EPIPE or (self._is_terminal and fault.errno == errno.EIO)
            if not is_gone and not self._is_log:
                raise
            return memoryview(content).nbytes
