"""Where this process is in its work; what supervises it looks here."""

from dataclasses import dataclass

__all__ = ["Milestone", "find_milestone", "report_progress"]


@dataclass(frozen=True, slots=True)
class Milestone:
    """What a process did last."""

    count: int
    """Reports until then. Threads may report at once and one go uncounted: what matters is that it changes."""
    phase: str
    epoch: int | None
    """Counted from 1."""
    item: int | str | None
    """A batch, counted from 1, or a case."""

    def __str__(self) -> str:
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        item = f"batch {self.item}" if isinstance(self.item, int) else self.item
        return f"{self.phase}{epoch}" + ("" if item is None else f", {item}")


_last = Milestone(0, "start", None, None)


def report_progress(phase: str, epoch: int | None = None, item: int | str | None = None) -> None:
    """Say that the work goes on: what is being done, and how far it is.

    To be called wherever a loop of a job comes round: a batch, a case that was read or predicted, a recording. It
    costs less than a microsecond. A process that reports nothing for ``parallel.timeout`` is taken to hang if no other
    one reports either.

    Parameters
    ----------
    phase
        A word or two, such as ``"train"`` or ``"read"``.
    epoch, item
        Where in it: an epoch and a batch, both counted from 1, or the name of a case.
    """
    global _last
    _last = Milestone(_last.count + 1, phase, epoch, item)


def find_milestone() -> Milestone:
    """Return what was reported last."""
    return _last
