"""A forecast of a running training, by a process of its own: ``volseg plan``, with its answer as JSON.

No thread of the training's process: to follow a step, a process takes other devices and other processes for its own,
which holds for all its threads; and the seconds of Python that it takes would be taken from the training. Nobody waits
for it. It sees no GPU, has one thread for its arithmetic, and ends with the process that asked.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError
from volseg.experiment.alternatives import find_forecast
from volseg.experiment.own_components import components_arguments
from volseg.forecast.candidate import Candidate, Forecast
from volseg.forecast.memory_use import MemoryUse
from volseg.launched import OF_JOB, OWN_LAUNCHER
from volseg.monitoring.memory import MemoryForecast
from volseg.parallel.processes.progress import report_progress

__all__ = ["Answer", "AskedOfCandidate", "Gpus", "PlanBeside", "read_plan"]

NOTHING_FITS = 3
"""Exit status of ``volseg plan`` where it has an answer all the same."""

LOWEST_PRIORITY = 19
"""Niceness: on a core that somebody else wants too it gets a sixtieth or so."""

LONGEST_SECONDS = 120.0
"""For an answer that somebody waits for."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind, which are planned for."""

    name: str
    """As torch calls them."""
    memory: int
    """Bytes that this process can take of one."""
    count: int = 1

    @property
    def told_memory(self) -> str:
        """Its memory as a plan is asked for it."""
        return f"{self.memory / 2**30:.3f}GiB"

    @classmethod
    def find(cls, device: torch.device, count: int) -> "Gpus | None":
        """Return what a device is; None where it is no GPU."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        own = torch.cuda.memory_reserved(device)
        return cls(name=torch.cuda.get_device_name(device), memory=min(int(allowed), free + own), count=count)


class AskedOfCandidate:
    """What `FirstSteps` asks for: the forecast of what this training does.

    Parameters
    ----------
    make : callable
        Begins the plan.
    candidate : Candidate
        What the training does.
    """

    def __init__(self, make: Callable[[], "PlanBeside"], candidate: Candidate) -> None:
        self._make, self._candidate = make, candidate
        self._plan: PlanBeside | None = None

    def begin(self) -> None:
        """Begin to plan, if it has not begun."""
        self._plan = self._plan or self._make()

    def poll(self) -> MemoryForecast | None:
        """Return it if it is there; never waits."""
        answer = None if self._plan is None else self._plan.poll()
        if answer is None:
            return None
        found = find_forecast(self._candidate, answer.forecasts)
        if found is None or found.memory is None:
            refused = "nobody forecast what this training does" if found is None else found.refused
            return MemoryForecast(problem=answer.problem or refused or "it says nothing of memory")
        # With which the first steps are compared.
        return MemoryForecast(memory=found.memory.of_steps(), devices=tuple(use.of_steps() for use in found.devices))

    def close(self) -> None:
        """Give up on it."""
        if self._plan is not None:
            self._plan.close()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back."""

    forecasts: tuple[Forecast, ...] = ()
    reserve: int = 0
    """Bytes of a GPU that something else holds: cases, and batches on their way."""
    problem: str = ""
    """Why there are none."""
    remedies: tuple[str, ...] = ()
    """Where nothing fits, what would: larger GPUs, more of them, a smaller patch, with numbers."""


class PlanBeside:
    """Ask what a config's training takes of some GPUs.

    Parameters
    ----------
    config : ExperimentConfig
        Of the training; what it leaves open is tried in every way.
    gpus : Gpus
        What is planned for.
    thorough : bool
        Whether those ways are looked at too that cannot be the fastest.
    waits : bool
        Whether somebody waits for the answer. Otherwise it is made of what this process and its workers leave of the
        cores: it is some ten seconds of Python, and comes later, or not before a short training ends.
    """

    def __init__(self, config: ExperimentConfig, gpus: Gpus, *, thorough: bool = False, waits: bool = True) -> None:
        self._answer: Answer | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="volseg_plan_")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            file = dump_config(config.located(), Path(self._folder.name) / "config.yaml")
            command = run_module("volseg", "plan", str(file), "--json", "--gpu", gpus.name)
            command += ["--all"] if thorough else ["--numbers"]  # what runs here may be forecast not to fit
            command += ["--gpus", str(gpus.count), "--gpu-memory", gpus.told_memory]
            with self._open("out") as out, self._open("err") as err:
                self._process = subprocess.Popen(  # noqa: S603
                    [*command, *components_arguments()], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_choose()
                )
            if not waits:
                _give_way(self._process.pid)
        except (ConfigError, OSError) as fault:  # components of this process alone, or no process to be had
            self._answer = Answer(problem=_first_line(str(fault)))

    def poll(self) -> Answer | None:
        """Return the answer if it is there."""
        if self._answer is None and self._process is not None and self._process.poll() is not None:
            self._answer = self._read(self._process.returncode)
            self._folder.cleanup()
        return self._answer

    def wait(self, seconds: float = LONGEST_SECONDS) -> Answer:
        """Return the answer, or that it took too long."""
        end = time.monotonic() + seconds
        while (answer := self.poll()) is None:
            if time.monotonic() > end:
                self.close()
                return Answer(problem=f"it was not there after {seconds:.0f} s")
            report_progress("forecast")  # others may wait for this process meanwhile
            time.sleep(0.05)
        return answer

    def close(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _open(self, name: str) -> Any:
        return (Path(self._folder.name) / name).open("wb")

    def _read(self, status: int) -> Answer:
        said, faults = ((Path(self._folder.name) / name).read_text(encoding="utf-8") for name in ("out", "err"))
        if status not in (0, NOTHING_FITS):
            lines = [line for line in faults.splitlines() if line.strip()]
            return Answer(problem=lines[-1].removeprefix("volseg: ") if lines else f"it ended with status {status}")
        try:
            return read_plan(said)
        except (KeyError, TypeError, ValueError) as fault:
            return Answer(problem=f"what volseg plan printed is no plan ({_first_line(str(fault))})")


def read_plan(said: str) -> Answer:
    """Return the answer that a plan as JSON is."""
    report = json.loads(said)
    forecasts = tuple(_read_forecast(row) for row in report["candidates"])
    remedies = tuple(map(str, report["remedies"]))
    return Answer(forecasts=forecasts, reserve=report["reserve_bytes"], remedies=remedies)


def _read_forecast(row: Mapping[str, Any]) -> Forecast:
    """Return the forecast that a row of the plan is."""
    names = ("data", "spatial", "pipeline", "split_size", "checkpoint", "kernels", "recorded")
    memory = None if row["used_bytes"] is None else _read_use(row, row["peak_in"] or "")
    devices = tuple(_read_use(device, "") for device in row["devices"])
    candidate = Candidate(**{name: row[name] for name in names})
    return Forecast(
        candidate=candidate, memory=memory, devices=devices, seconds=row["step_seconds"], refused=row["refused"]
    )


def _read_use(row: Mapping[str, Any], peak_in: str) -> MemoryUse:
    return MemoryUse(
        used=row["used_bytes"],
        reserved=row["reserved_bytes"],
        outside=row["outside_bytes"],
        peak_in=peak_in,
        reserved_by_steps=row["step_reserved_bytes"],
    )


def _choose() -> dict[str, str]:
    """Return the environment of a process that is none of the job, and computes on the CPU beside it."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_JOB}
    # It may be told in any encoding; what is read here is UTF-8.
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"}
    return {**kept, **own, OWN_LAUNCHER: str(os.getpid())}


def _give_way(process: int) -> None:
    """Let a process, and those that it starts, run where nobody else wants a core."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process, LOWEST_PRIORITY)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
