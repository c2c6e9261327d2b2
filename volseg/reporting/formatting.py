"""Numbers and times as text."""

import math
import time

__all__ = ["UNITS", "format_duration", "format_moment", "format_value"]

UNITS = {"HD95": "mm", "HD": "mm", "ASSD": "mm", "volume_diff_ml": "ml"}


def format_value(value: float, metric: str) -> str:
    """Return a score with as many digits as are read of it.

    Examples
    --------
    >>> format_value(0.88913, "Dice"), format_value(math.inf, "HD95"), format_value(math.nan, "Dice")
    ('0.8891', 'infinite', '-')
    """
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "-"
    return f"{value:.3f}" if metric in UNITS else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Return a time as a person says it.

    Examples
    --------
    >>> [format_duration(seconds) for seconds in (0.4, 59, 61, 3600, 90061)]
    ['0.4 s', '59 s', '1 min 1 s', '1 h 0 min', '25 h 1 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_moment(moment: float) -> str:
    """Return a moment (seconds since 1970) in UTC, as a page is read elsewhere than it was written."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))
