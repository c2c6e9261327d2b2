"""Define the findings about a machine, and their levels."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""Levels from a passed check to a fault that stops a training."""


@dataclass(frozen=True)
class MachineFinding:
    """The result of one check.

    ``note``: worth knowing. ``warning``: works, but slower or not for long. ``error``: does not work.
    """

    check: str
    """Name of the check, such as ``gpu.architecture``. Stable, for scripts."""
    level: Level
    found: str
    """The value found."""
    why: str = ""
    """Why it matters; empty for a passed check."""
    remedy: str = ""
    """Command to run, or setting to change."""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.why), f"{self.check}: what is not well says why, and what is does not"
        assert self.level in ("ok", "note") or self.remedy, f"{self.check}: a {self.level} has a remedy"


def ok(check: str, found: str) -> MachineFinding:
    """Return the finding of a passed check."""
    return MachineFinding(check, "ok", found)


def note(check: str, found: str, why: str, remedy: str = "") -> MachineFinding:
    """Return a finding that is worth knowing."""
    return MachineFinding(check, "note", found, why, remedy)


def warning(check: str, found: str, why: str, remedy: str) -> MachineFinding:
    """Return a finding about something that works, but slower or not for long."""
    return MachineFinding(check, "warning", found, why, remedy)


def error(check: str, found: str, why: str, remedy: str) -> MachineFinding:
    """Return a finding about something that does not work."""
    return MachineFinding(check, "error", found, why, remedy)


def gib(num_bytes: float) -> str:
    """Return a size in MiB, or in GiB from 1 GiB on.

    >>> gib(64 * 2**20), gib(24.2 * 2**30)
    ('64 MiB', '24.2 GiB')
    """
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
