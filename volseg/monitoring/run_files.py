"""Read and write the three files with a training's progress in the run folder, and look at runs from outside.

::

    history.jsonl    a line for each epoch: the numbers that TensorBoard shows
    status.json      the progress of the training; rewritten every few seconds, and whenever its state changes
    times.json       the time of each process by activity; a training that was resumed has several parts

All are read without torch, so that a health check is fast. A file that a crash cut off is not an error: the last line
of the history is dropped, and the two others count as absent.

The age of the last heartbeat is measured by this machine's clock. Whether the process still runs is known only on its
own machine and in the same namespace of process ids (a container has its own).
"""

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from volseg.errors import DataError
from volseg.files import replace_nan, replacing
from volseg.formatting import format_duration
from volseg.lifetime import is_running

HISTORY, STATUS, TIMES = "history.jsonl", "status.json", "times.json"

THE_REST = "the rest"
"""Name of the span for the seconds of an ended process that no other span covers."""

State = Literal["preparing", "training", "validating", "finished", "interrupted", "failed"]

ENDED: tuple[State, ...] = ("finished", "interrupted", "failed")
"""Final states of a run."""

Content = TypeVar("Content")

YEAR_10000 = 253_402_300_800
"""Limit in seconds since 1970: later moments have no date, and no training takes longer."""

Seconds = Annotated[float, Field(gt=-YEAR_10000, lt=YEAR_10000)]
"""Seconds; the difference of two clocks may be slightly negative."""
Moment = Annotated[float, Field(ge=0, lt=YEAR_10000)]
"""Seconds since 1970."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Process = Annotated[int, Field(ge=1, lt=2**31)]
"""Process id; for the system's functions, other numbers denote groups of processes."""


@dataclass(frozen=True, kw_only=True)
class EpochLine:
    """Numbers of an epoch."""

    epoch: Annotated[int, Field(ge=1, lt=2**63)]
    """Number of the epoch, counted from 1, as at the terminal."""
    step: Count
    """Batches of the training up to its end."""
    time: Moment
    """Time of its end."""
    scalars: Mapping[str, float]
    """Numbers by TensorBoard's tags; NaN if undefined, such as the Dice of a label that does not occur."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Progress of a training."""

    state: State
    time: Moment
    """Time of writing, by the clock of ``host``."""
    started: Moment
    """Start of the process."""
    host: str
    pid: Process
    epoch: Count | None = None
    """Completed epochs."""
    epochs: Count | None = None
    batch: Count | None = None
    """Completed batches of the current epoch."""
    batches: Count | None = None
    loss: float | None = None
    score: float | None = None
    """Mean Dice of the last validation."""
    best: float | None = None
    seconds_left: Seconds | None = None
    """Seconds until the last epoch ends, by the mean of the last epochs and of all validations."""
    voxels_per_second: float | None = None
    memory_gib: float | None = None
    """GiB reserved on the fullest GPU."""
    message: str = ""
    """Cause of the training's failure, or its current activity."""
    process_space: str = ""
    """Namespace of ``pid``: each container of a host has its own; empty if unknown."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is in a final state."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """Use of time of one process."""

    begun: Moment
    """Start of the process."""
    seconds: Seconds
    """Seconds from the start to the last heartbeat."""
    spans: Mapping[str, Seconds] = field(default_factory=dict)
    """Seconds by activity: ``reading``, ``training``, ``waiting for data``, ``validation`` and so on, without
    overlaps."""


_LINE, _STATUS = TypeAdapter(EpochLine), TypeAdapter(RunStatus)
_PARTS = TypeAdapter(dict[Literal["parts"], tuple[RunPart, ...]])


def append_history(history: str | Path | TextIO, line: EpochLine) -> None:
    """Add an epoch to a history, given as a path or an open file, and flush the file."""
    if isinstance(history, str | Path):
        with Path(history).open("a", encoding="utf-8") as opened:
            append_history(opened, line)
        return
    history.write(f"{json.dumps(replace_nan(asdict(line)), allow_nan=False)}\n")
    history.flush()


def begin_history(file: str | Path, epoch: int) -> None:
    """Drop the lines after ``epoch``, which will be trained again, and a line that a crash cut off."""
    file = Path(file)
    kept = [line for line in read_history(file) if line.epoch <= epoch]
    if not kept:
        file.unlink(missing_ok=True)
        return
    with replacing(file) as partial, partial.open("w", encoding="utf-8") as history:
        for line in kept:
            append_history(history, line)


def read_history(file: str | Path) -> list[EpochLine]:
    """Return the epochs of a history; an absent file has none.

    Raises
    ------
    DataError
        If a line before the last one is not a line of a history.
    """
    file = Path(file)
    if not file.exists():
        return []
    texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    texts.pop()  # empty after a complete last line; else a line that a crash cut off
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["scalars"] = {tag: math.nan if value is None else value for tag, value in line["scalars"].items()}
            found.append(_LINE.validate_python(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
            if number == len(texts):  # bytes that never reached the disk before a power cut
                break
            raise DataError(
                f"{file}, line {number}, is not a line of a history ({str(fault).splitlines()[0]}), got {text[:80]!r}; "
                "remove it"
            ) from fault
    return found


def write_status(file: str | Path, status: RunStatus) -> None:
    """Replace the status of a training."""
    # Not flushed to the disk: it is rewritten continually, and would be outdated after a power cut anyway.
    with replacing(file, flush=False) as partial:
        partial.write_text(json.dumps(replace_nan(asdict(status)), indent=2) + "\n", encoding="utf-8")


def read_status(file: str | Path) -> RunStatus | None:
    """Return the status of a training; None if unknown."""
    return _read(file, _STATUS)


def read_times(file: str | Path) -> tuple[RunPart, ...]:
    """Return the use of time of a run, process after process; empty if unknown."""
    found = _read(file, _PARTS)
    return () if found is None else found.get("parts", ())


def write_times(file: str | Path, parts: Sequence[RunPart]) -> None:
    """Replace the record of the run's time: the parts of earlier processes, and of this process."""
    with replacing(file, flush=False) as partial:
        partial.write_text(json.dumps({"parts": [asdict(part) for part in parts]}, indent=2) + "\n", encoding="utf-8")


def list_numbered(folder: Path, kinds: str = "fold") -> dict[int, Path]:
    """Return the folders of folds, or of other ``kinds`` of runs such as ``fold|trial``, by number."""
    found = {path: re.fullmatch(rf"(?:{kinds})_(\d+)", path.name) for path in folder.glob("*_*")}
    return dict(sorted((int(match.group(1)), path) for path, match in found.items() if match))


def read_process_namespace() -> str:
    """Return the name of this process's namespace of process ids; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _read(file: str | Path, kind: TypeAdapter[Content]) -> Content | None:
    try:
        return kind.validate_json(Path(file).read_bytes())
    except FileNotFoundError:
        return None
    # A power cut left an incomplete file, or another program wrote it: unknown, as before the first writing.
    except (ValidationError, IsADirectoryError):
        return None


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

CONFIG = "config.yaml"
"""File of every run folder from the start of the run."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of one run."""

    folder: Path
    status: RunStatus | None
    """None if the run has not written a status."""
    age: float | None = None
    """Seconds since its last heartbeat, by this machine's clock."""
    is_gone: bool = False
    """Whether its process is gone without a final state; known only on its own machine."""
    remarks: Sequence[str] = ()

    def find_fault(self, max_age: float) -> str | None:
        """Return the fault of a run, given the largest age of its last heartbeat; None for a healthy run."""
        if self.status is None:
            return "it has no status"
        if self.status.state == "failed":
            return f"failed: {self.status.message}"
        if self.status.has_ended:
            return None
        if self.is_gone:
            return f"its process {self.status.pid} no longer runs"
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
            return [f"{self.folder}: no status (not started, or lost in a power cut)"]
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
    is_here = status.host == socket.gethostname() and status.process_space == read_process_namespace()
    is_gone = is_here and not status.has_ended and not is_running(status.pid)
    gone = (f"process {status.pid} died without a message; continue the run with --resume",) if is_gone else ()
    return Look(folder=folder, status=status, age=max(time.time() - status.time, 0.0), is_gone=is_gone, remarks=gone)


def parse_age(text: str) -> float:
    """Return the seconds of a text such as ``90s``, ``10m``, ``2h`` or ``1d``; without a unit, it is in seconds.

    >>> parse_age("10m"), parse_age("1.5")
    (600.0, 1.5)
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise DataError(f"an age must be a number with s, m, h or d, such as 10m, got {text!r}")
    return seconds


def format_speed(voxels_per_second: float) -> str:
    """Return a training's speed as text, in thousands of voxels below a million.

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
