"""Inspect a run folder from outside, without torch: the progress of a training, and whether it still runs.

The age of the last heartbeat is judged by this machine's clock. Whether the process is there is known only on its own
machine, in the same space of process ids (a container has its own).
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from volseg.errors import DataError
from volseg.formatting import format_duration
from volseg.lifetime import is_running
from volseg.monitoring.run_files import STATUS, RunStatus, list_numbered, read_process_namespace, read_status

CLOCKS_DIFFER_SECONDS = 30.0
"""Between the time that a status says and the one at which the disk got it, from which on it is told."""

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

CONFIG = "config.yaml"
"""What every run folder has once it was begun."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of one run."""

    folder: Path
    status: RunStatus | None
    """None of a run that said nothing of itself: one of an older volseg."""
    age: float | None = None
    """Seconds since its last heartbeat, by this machine's clock."""
    is_gone: bool = False
    """Whether its process is gone without a final state; known only on its own machine."""
    remarks: Sequence[str] = ()

    def find_fault(self, max_age: float) -> str | None:
        """Return the fault of a run, given the largest age of its last heartbeat; None for a healthy run."""
        if self.status is None:
            return "no status is known"
        if self.status.state == "failed":
            return f"failed: {self.status.message}"
        if self.status.has_ended:
            return None
        if self.is_gone:
            return f"its process {self.status.pid} is gone"
        assert self.age is not None
        if self.age > max_age:
            return f"the last heartbeat is {format_duration(self.age)} old"
        return None

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        status: Mapping[str, Any] = {"state": None} if self.status is None else asdict(self.status)
        return {
            "folder": str(self.folder),
            **status,
            "age_seconds": self.age,
            "process_is_gone": self.is_gone,
            "remarks": list(self.remarks),
        }

    def lines(self) -> list[str]:
        """Return the state as lines of text."""
        status = self.status
        if status is None:
            return [f"{self.folder}: no status is known (a run of an older volseg, or a power cut)"]
        lines = [f"{self.folder}: {status.state}{'' if status.state != 'failed' else f', {status.message}'}"]
        if status.epoch is not None:
            lines.append(f"  epoch   {_tell_progress(status)}")
        scores = {"loss": status.loss, "Dice": status.score, "best": status.best}
        if told := [f"{name} {value:.4f}" for name, value in scores.items() if value is not None]:
            lines.append(f"  scores  {', '.join(told)}")
        speed = [] if status.voxels_per_second is None else [format_speed(status.voxels_per_second)]
        speed += [] if status.memory_gib is None else [f"{status.memory_gib:.1f} GiB of GPU memory"]
        if status.seconds_left is not None and not status.has_ended:
            speed.insert(0, f"{format_duration(status.seconds_left)} left")
        if speed:
            lines.append(f"  time    {', '.join(speed)}")
        doing = "" if status.has_ended or not status.message else f" ({status.message})"
        assert self.age is not None
        lines.append(f"  alive   {format_duration(self.age)} ago, by process {status.pid} on {status.host}{doing}")
        return [*lines, *(f"  note    {remark}" for remark in self.remarks)]


def list_run_folders(folder: str | Path) -> list[Path]:
    """Return the run folders at a path: itself, the folds of a cross-validation, or the trials of a search."""
    folder = Path(folder)
    if _is_run(folder):
        return [folder]
    return [run for run in list_numbered(folder, "fold|trial").values() if _is_run(run)]


def look_at(folder: str | Path) -> Look:
    """Return the progress of a folder's run, and whether it still runs."""
    folder = Path(folder)
    status = read_status(folder / STATUS)
    if status is None:
        return Look(folder=folder, status=None)
    age, remarks = time.time() - status.time, []
    lag = (folder / STATUS).stat().st_mtime - status.time
    if age < -CLOCKS_DIFFER_SECONDS:
        remarks.append(
            f"the clock of {status.host} is at least {format_duration(-age)} ahead of this machine's, so the age is "
            "not known"
        )
    elif abs(lag) > CLOCKS_DIFFER_SECONDS:
        way = "behind" if lag > 0 else "ahead of"
        remarks.append(
            f"the clock of {status.host} is {format_duration(abs(lag))} {way} the disk's, or the folder is a copy: the "
            "age may be wrong by as much"
        )
    is_here = status.host == socket.gethostname() and status.process_space == read_process_namespace()
    is_gone = is_here and not status.has_ended and not is_running(status.pid)
    if is_gone:
        remarks.append(f"process {status.pid} is gone and said nothing; go on with the run by --resume")
    return Look(folder=folder, status=status, age=max(age, 0.0), is_gone=is_gone, remarks=tuple(remarks))


def parse_age(text: str) -> float:
    """Return seconds of a text such as ``90s``, ``10m``, ``2h`` or ``1d``; a number alone is seconds.

    >>> parse_age("10m"), parse_age("1.5")
    (600.0, 1.5)
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise DataError(f"an age is a number with s, m, h or d, such as 10m, got {text!r}")
    return seconds


def format_speed(voxels_per_second: float) -> str:
    """Return how fast a training is, in thousands of voxels where millions would be 0.0.

    >>> format_speed(45.2e6), format_speed(1.2e6), format_speed(11_095)
    ('45.2 Mvoxel/s', '1.2 Mvoxel/s', '11.1 kvoxel/s')
    """
    factor, letter = (1e6, "M") if voxels_per_second >= 1e6 else (1e3, "k")
    return f"{voxels_per_second / factor:.1f} {letter}voxel/s"


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / STATUS).is_file()


def _tell_progress(status: RunStatus) -> str:
    told = f"{status.epoch} of {status.epochs} done"
    return f"{told}, batch {status.batch} of {status.batches}" if status.batch else told
