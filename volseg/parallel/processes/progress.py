"""Position of this process in its work, which its supervision reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Milestone:
    """Last reported step of a process."""

    count: int
    """Number of reports. Concurrent reports of threads may be counted once: only a change of the number matters."""
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
    """Report progress: the current phase, and the position in it.

    Call it in every loop of a job: for a batch, a case that was read or predicted, a recording. It costs less than a
    microsecond. A process that reports nothing for ``parallel.timeout`` counts as hanging if no other process reports
    either.

    Parameters
    ----------
    phase
        A word or two, such as ``"train"`` or ``"read"``.
    epoch, item
        Position in the phase: an epoch and a batch, both counted from 1, or the name of a case.
    """
    global _last
    _last = Milestone(_last.count + 1, phase, epoch, item)


def get_milestone() -> Milestone:
    """Return the last report."""
    return _last
