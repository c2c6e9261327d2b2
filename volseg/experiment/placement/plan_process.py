"""``volseg plan`` in a process of its own, asked by a training that waits for the answer.

A process that traces a step takes fake GPUs for its own, and the training's process has real ones. The plan's process
sees no GPU, has one thread for its arithmetic, and ends with the process that asked.
"""

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError
from volseg.estimate.candidate import Estimate
from volseg.estimate.report import PlanReport
from volseg.experiment.own_components import components_arguments
from volseg.launched import OF_JOB, OWN_LAUNCHER
from volseg.parallel.processes.progress import report_progress

__all__ = ["LONGEST_SECONDS", "Answer", "Gpus", "read_plan", "run_plan"]

NOTHING_FITS = 3
"""Exit status of ``volseg plan`` if nothing fits; the output is still an answer."""

LONGEST_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one kind to plan for."""

    name: str
    """Name in torch."""
    memory: int
    """Bytes of one GPU that this process can use."""
    count: int = 1

    @property
    def told_memory(self) -> str:
        """Memory as an option of ``volseg plan``."""
        return f"{self.memory / 2**30:.3f}GiB"

    @classmethod
    def find(cls, device: torch.device, count: int) -> "Gpus | None":
        """Return the description of a device, or None if it is no GPU."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
        own = torch.cuda.memory_reserved(device)
        return cls(name=torch.cuda.get_device_name(device), memory=min(int(allowed), free + own), count=count)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of the plan's process."""

    forecasts: tuple[Estimate, ...] = ()
    reserve: int = 0
    """Bytes of a GPU for other uses: cases, and prefetched batches."""
    problem: str = ""
    """Reason for the lack of estimates."""
    remedies: tuple[str, ...] = ()
    """Remedies if nothing fits, with numbers: larger GPUs, more of them, a smaller patch."""


def run_plan(
    config: ExperimentConfig, gpus: Gpus, *, thorough: bool = False, seconds: float = LONGEST_SECONDS
) -> Answer:
    """Return the estimates of a config's training on some GPUs, or the problem, such as a timeout.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training; every value that it leaves open is tried.
    gpus : Gpus
        GPUs to plan for.
    thorough : bool
        Whether to trace candidates too that cannot be the fastest.
    seconds : float
        Time limit for the answer.
    """
    with tempfile.TemporaryDirectory(prefix="volseg_plan_") as name:
        folder = Path(name)
        try:
            file = dump_config(config.located(), folder / "config.yaml")
            command = run_module("volseg", "plan", str(file), "--json", "--gpu", gpus.name)
            command += ["--all"] if thorough else ["--numbers"]  # its estimate may exceed the memory
            command += ["--gpus", str(gpus.count), "--gpu-memory", gpus.told_memory, *components_arguments()]
            with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
                process = subprocess.Popen(  # noqa: S603
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_make_environment()
                )
        except (ConfigError, OSError) as fault:  # components known only to this process, or no process available
            return Answer(problem=_first_line(str(fault)))
        try:
            if not _wait(process, seconds):
                return Answer(problem=f"it was not there after {seconds:.0f} s")
        finally:
            process.kill()
            process.wait()
        return _read(process.returncode, folder)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process ends within ``seconds``."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > end:
            return False
        report_progress("forecast")  # other processes may wait for this one meanwhile
        time.sleep(0.05)
    return True


def _read(status: int, folder: Path) -> Answer:
    said, faults = ((folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
    if status not in (0, NOTHING_FITS):
        lines = [line for line in faults.splitlines() if line.strip()]
        return Answer(problem=lines[-1].removeprefix("volseg: ") if lines else f"it ended with status {status}")
    try:
        return read_plan(said)
    except ValueError as fault:
        return Answer(problem=f"what volseg plan printed is no plan ({_first_line(str(fault))})")


def read_plan(said: str) -> Answer:
    """Return the answer from a plan as JSON."""
    report = PlanReport.model_validate_json(said)
    forecasts = tuple(row.estimate for row in report.candidates)
    return Answer(forecasts=forecasts, reserve=report.reserve_bytes, remedies=report.remedies)


def _make_environment() -> dict[str, str]:
    """Return the environment of a process outside the job that computes on the CPU."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_JOB}
    # The environment may name any encoding; this process reads UTF-8.
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"}
    return {**kept, **own, OWN_LAUNCHER: str(os.getpid())}


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
