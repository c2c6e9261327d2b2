"""Format scores, durations, moments, tables and lists of names as text."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

UNITS = {"HD95": "mm", "HD": "mm", "ASSD": "mm", "volume_diff_ml": "ml"}


def format_value(value: float, metric: str) -> str:
    """Return a score with as many digits as are useful.

    Examples
    --------
    >>> format_value(0.88913, "Dice"), format_value(math.inf, "HD95"), format_value(math.nan, "Dice")
    ('0.8891', 'infinite', '-')
    """
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "-"
    return f"{value:.3f}" if metric in UNITS else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    Examples
    --------
    >>> [format_duration(seconds) for seconds in (0.4, 59, 61, 3600, 90061)]
    ['0.4 s', '59 s', '1 min 1 s', '1 h', '1 d 1 h']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{value} {unit}" for value, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")) if value]
    return " ".join(parts[:2])


def format_moment(moment: float) -> str:
    """Return a moment (seconds since 1970) as text in UTC, since a page may be read in another time zone."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def align_columns(rows: Iterable[Sequence[str]], gap: str = "  ") -> list[str]:
    """Return each row as a line, with the cells of a column aligned at their beginning."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_table(rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with columns as wide as necessary; the first row is the header.

    Examples
    --------
    >>> print(format_table([("label", "Dice"), ("liver", "0.9510")]))
    | label | Dice   |
    | ----- | ------ |
    | liver | 0.9510 |
    """
    header, *others = (["", *row, ""] for row in rows)
    rule = ["-" * max(map(len, column)) for column in zip(header, *others, strict=True)]
    return "\n".join(line.lstrip() for line in align_columns([header, rule, *others], " | "))


def list_duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in the order of their first occurrence.

    >>> list_duplicates(["b", "a", "c", "a", "b"])
    ['b', 'a']
    """
    return [name for name, count in Counter(names).items() if count > 1]


def list_some(texts: Sequence[str], most: int = 5) -> str:
    """List the first ``most`` texts, and count the rest.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")
