"""Read and write the three files with a training's progress in the run folder, and look at runs from outside.

::

    history.jsonl    a line for each epoch: the numbers that TensorBoard shows
    status.json      how far the training is; rewritten every few seconds, and whenever its state changes
    times.json       what the time of each process went by with; a training that was resumed has several parts

All are read without torch, so that a health check takes no seconds. A file that a crash cut off is no error: of the
history the last line is dropped, of the two others nothing is known then.

The age of the last heartbeat is judged by this machine's clock. Whether the process is there is known only on its own
machine, in the same space of process ids (a container has its own).
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
"""Of the seconds of a process that has ended, those that no span accounts for; with them its spans add up."""

State = Literal["preparing", "training", "validating", "finished", "interrupted", "failed"]

ENDED: tuple[State, ...] = ("finished", "interrupted", "failed")
"""Final states of a run."""

Content = TypeVar("Content")

YEAR_10000 = 253_402_300_800
"""In seconds since 1970: a later moment has no date, and no training takes longer."""

Seconds = Annotated[float, Field(gt=-YEAR_10000, lt=YEAR_10000)]
"""A difference of two clocks may be a hair below nothing."""
Moment = Annotated[float, Field(ge=0, lt=YEAR_10000)]
"""In seconds since 1970."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Process = Annotated[int, Field(ge=1, lt=2**31)]
"""The system's functions take others for groups of processes."""


@dataclass(frozen=True, kw_only=True)
class EpochLine:
    """An epoch in numbers."""

    epoch: Annotated[int, Field(ge=1, lt=2**63)]
    """Counted from 1, as at the terminal: how many are done."""
    step: Count
    """Batches of the training that were done at its end."""
    time: Moment
    """When that was."""
    scalars: Mapping[str, float]
    """By the tags of TensorBoard; NaN for what could not be told, such as the Dice of a label that is nowhere."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a training is."""

    state: State
    time: Moment
    """When this was written, by the clock of ``host``."""
    started: Moment
    """When the process began."""
    host: str
    pid: Process
    epoch: Count | None = None
    """Epochs that are done."""
    epochs: Count | None = None
    batch: Count | None = None
    """Batches of the current epoch that are done."""
    batches: Count | None = None
    loss: float | None = None
    score: float | None = None
    """Mean Dice of the last validation."""
    best: float | None = None
    seconds_left: Seconds | None = None
    """Until the last epoch ends, by the mean of the last epochs and of all validations."""
    voxels_per_second: float | None = None
    memory_gib: float | None = None
    """Reserved on the fullest GPU."""
    message: str = ""
    """Why the training failed, or what it does now."""
    process_space: str = ""
    """In which ``pid`` means something: of containers on one host each has its own; empty where that is not known."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is in a final state."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """Use of time of one process."""

    begun: Moment
    """When it began."""
    seconds: Seconds
    """From there to its last heartbeat."""
    spans: Mapping[str, Seconds] = field(default_factory=dict)
    """Seconds by what was done: ``reading``, ``training``, ``waiting for data``, ``validation`` and so on; none of them
    lies within another one."""


_LINE, _STATUS = TypeAdapter(EpochLine), TypeAdapter(RunStatus)
_PARTS = TypeAdapter(dict[Literal["parts"], tuple[RunPart, ...]])


def append_history(history: str | Path | TextIO, line: EpochLine) -> None:
    """Add an epoch to a history, which may be open; what is written is out of this process when this returns."""
    if isinstance(history, str | Path):
        with Path(history).open("a", encoding="utf-8") as opened:
            append_history(opened, line)
        return
    history.write(f"{json.dumps(replace_nan(asdict(line)), allow_nan=False)}\n")
    history.flush()


def begin_history(file: str | Path, epoch: int) -> None:
    """Drop the lines past ``epoch``, which will be trained again, and one that a crash cut off."""
    file = Path(file)
    kept = [line for line in read_history(file) if line.epoch <= epoch]
    if not kept:
        file.unlink(missing_ok=True)
        return
    with replacing(file) as partial, partial.open("w", encoding="utf-8") as history:
        for line in kept:
            append_history(history, line)


def read_history(file: str | Path) -> list[EpochLine]:
    """Return the epochs of a history; none where there is no file.

    Raises
    ------
    DataError
        If another line than the last one is none.
    """
    file = Path(file)
    if not file.exists():
        return []
    texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    texts.pop()  # nothing behind the last line's end; else a line that a crash cut off
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
    # Not flushed to the disk: it is written again and again, and after a power cut it would be old anyway.
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
    """Replace what is known of the time that went by: the parts of earlier processes, and this one's."""
    with replacing(file, flush=False) as partial:
        partial.write_text(json.dumps({"parts": [asdict(part) for part in parts]}, indent=2) + "\n", encoding="utf-8")


def list_numbered(folder: Path, kinds: str = "fold") -> dict[int, Path]:
    """Return the folders of folds, or of other ``kinds`` of runs such as ``fold|trial``, by number."""
    found = {path: re.fullmatch(rf"(?:{kinds})_(\d+)", path.name) for path in folder.glob("*_*")}
    return dict(sorted((int(match.group(1)), path) for path, match in found.items() if match))


def read_process_namespace() -> str:
    """Return a name of the space in which this system's process ids mean something; empty where it has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _read(file: str | Path, kind: TypeAdapter[Content]) -> Content | None:
    try:
        return kind.validate_json(Path(file).read_bytes())
    except FileNotFoundError:
        return None
    # A power cut left a name without its bytes, or somebody put something else there: nothing is known, as before the
    # first writing.
    except (ValidationError, IsADirectoryError):
        return None


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

CONFIG = "config.yaml"
"""What every run folder has once it was begun."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of one run."""

    folder: Path
    status: RunStatus | None
    """None if the run has written none."""
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
            return [f"{self.folder}: no status is known (not begun, or a power cut)"]
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
    gone = (f"process {status.pid} is gone and said nothing; go on with the run by --resume",) if is_gone else ()
    return Look(folder=folder, status=status, age=max(time.time() - status.time, 0.0), is_gone=is_gone, remarks=gone)


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
