"""What is said of a machine."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["LEVELS", "Level", "MachineFinding", "error", "gib", "note", "ok", "warning"]

Level = Literal["ok", "note", "warning", "error"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From what is well to what stops a training."""


@dataclass(frozen=True)
class MachineFinding:
    """One thing that was looked at.

    ``note``: worth knowing. ``warning``: it works, and slower, or not for long. ``error``: it does not work.
    """

    check: str
    """What was looked at: ``gpu.architecture``. Stable, for scripts."""
    level: Level
    found: str
    """The value."""
    why: str = ""
    """Why it matters; of what is well, nothing."""
    remedy: str = ""
    """What to type or to set."""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.why), f"{self.check}: what is not well says why, and what is does not"
        assert self.level in ("ok", "note") or self.remedy, f"{self.check}: a {self.level} has a remedy"


def ok(check: str, found: str) -> MachineFinding:
    """Return the finding that something is as it should be."""
    return MachineFinding(check, "ok", found)


def note(check: str, found: str, why: str, remedy: str = "") -> MachineFinding:
    """Return the finding of something that is worth knowing."""
    return MachineFinding(check, "note", found, why, remedy)


def warning(check: str, found: str, why: str, remedy: str) -> MachineFinding:
    """Return the finding of something that works, but slower or not for long."""
    return MachineFinding(check, "warning", found, why, remedy)


def error(check: str, found: str, why: str, remedy: str) -> MachineFinding:
    """Return the finding of something that does not work."""
    return MachineFinding(check, "error", found, why, remedy)


def gib(num_bytes: float) -> str:
    """Return a size as a reader takes it in.

    >>> gib(64 * 2**20), gib(24.2 * 2**30)
    ('64 MiB', '24.2 GiB')
    """
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"
