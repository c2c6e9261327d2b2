"""Spread the folds of a cross-validation over GPUs: one process per fold, one fold at a time per GPU.

Each process is a plain ``volseg train`` that sees one GPU and knows nothing of the others; a fold that fails leaves the
rest alone. Why not torch's launcher: its processes are one job, which ends when one of them fails.
"""

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError, ParallelError
from volseg.experiment.folds import Fold
from volseg.experiment.own_components import components_arguments
from volseg.launched import OWN_LAUNCHER
from volseg.parallel.devices import count_gpus
from volseg.workflow.interrupts import catch_signals

__all__ = ["choose_gpus", "train_in_processes"]

NUM_LAST_LINES = 15
SECONDS_BETWEEN_LOOKS = 0.1

logger = logging.getLogger(__name__)


def choose_gpus(
    config: ExperimentConfig,
    count: int,
    words: tuple[str, str] = ("trains each fold", "train one fold after another"),
) -> Sequence[str | None]:
    """Return ``count`` values of CUDA_VISIBLE_DEVICES, one per process; None for processes that share the CPU.

    That is what ``device: cpu`` means, and for trying things out.

    Parameters
    ----------
    config : ExperimentConfig
        Its device and parallel strategy.
    count : int
        Processes.
    words : (str, str)
        What each of them does, and what is done without them, for messages.

    Raises
    ------
    ConfigError
        If there are fewer GPUs, or the config has each fold use several.
    """
    parallel = config.parallel
    several = parallel.strategy in ("spatial", "pipeline") or parallel.devices is not None
    if parallel.num_gpus > 1 or (several and not parallel.is_on_one_device):
        raise ConfigError(
            f"--gpus {count} {words[0]} on one GPU, but parallel.strategy is {parallel.strategy} with devices "
            f"{parallel.devices}, on {parallel.num_gpus} GPU(s); leave out --gpus to {words[1]} on all of them"
        )
    if config.device == "cpu":
        return [None] * count
    visible = count_gpus()
    if not visible:
        raise ConfigError(
            f"--gpus {count} asks for more than the 0 GPU(s) that are visible; leave it out to {words[1]} on "
            "the CPU, or have processes share the CPU by --set device=cpu"
        )
    if visible < count:
        raise ConfigError(f"--gpus {count} asks for more than the {visible} GPU(s) that are visible")
    # Within what the user has made visible, which may be names (MIG slices) and need not begin at 0.
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(visible)))
    return [name.strip() for name in named.split(",")][:count]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """A fold that is being trained."""

    fold: Fold
    gpu: str | None
    process: subprocess.Popen[bytes]
    log: Path
    log_begin: int
    """Bytes in the log before this process: those of a sitting before."""
    started: float


def train_in_processes(
    folds: Sequence[Fold], gpus: Sequence[str | None], on_finished: Callable[[Fold, float], None]
) -> dict[int, ParallelError]:
    """Train folds, as many at a time as there are GPUs; those that were begun go on from their checkpoints.

    Ctrl-C and SIGTERM are passed on: each process stops after its batch with a checkpoint.

    Parameters
    ----------
    folds
        In the order in which they are begun.
    gpus
        See `choose_gpus`.
    on_finished
        Called with a fold that has ended well, and its seconds from the start of its process.

    Returns
    -------
    dict
        Fold number to error, for the folds that failed.
    """
    components_arguments()  # raises before anything is started
    waiting, free, running = deque(folds), list(gpus), list[_Job]()
    failures: dict[int, ParallelError] = {}
    with catch_signals() as interruption:
        told = False
        try:
            while running or (waiting and not interruption):
                while waiting and free and not interruption:
                    running.append(_start(waiting.popleft(), free.pop(0), len(gpus)))
                if interruption and not told:
                    told = True
                    logger.info("stopping %d fold(s) after their current batch", len(running))
                    for job in running:
                        job.process.send_signal(interruption.signal or 0)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.gpu)
                    seconds = time.perf_counter() - job.started
                    if job.process.returncode == 0:
                        on_finished(job.fold, seconds)
                    elif not told:
                        failures[job.fold.number] = _describe_failure(job)
                        logger.error("%s", failures[job.fold.number])
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:  # a fault of ours or a second Ctrl-C: leave nobody training unseen
            for job in running:
                job.process.terminate()
            for job in running:
                job.process.wait()
    interruption.raise_as_signal()
    return failures


def _start(fold: Fold, gpu: str | None, num_processes: int) -> _Job:
    folder = fold.config.folder
    config_file = dump_config(fold.config, folder.with_name(f"{folder.name}.yaml"))
    command = run_module("volseg", "train", str(config_file), *components_arguments())
    # By its number the process ends with this one, even if that is killed: see volseg.lifetime.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", OWN_LAUNCHER: str(os.getpid())}
    # The processes share the cores; torch would otherwise start a thread per core in each.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    path = folder.with_name(f"{folder.name}.log")
    with path.open("ab") as log:
        begin = log.tell()
        process = subprocess.Popen(  # noqa: S603 (our own interpreter and arguments; no shell)
            command + (["--resume"] if fold.folder.exists else []),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Else the terminal's Ctrl-C reaches it beside the one we pass on, and the second one stops it at once.
            start_new_session=True,
        )
    where = "CPU" if gpu is None else f"GPU {gpu}"
    logger.info("fold %d: training on %s, log %s", fold.number, where, path)
    return _Job(fold=fold, gpu=gpu, process=process, log=path, log_begin=begin, started=time.perf_counter())


def _describe_failure(job: _Job) -> ParallelError:
    written = job.log.read_bytes()[job.log_begin :].decode("utf-8", errors="replace")
    # A progress bar rewrites its line: what counts is what stands after the last carriage return.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in written.split("\n")]
    last = [line for line in lines if line.strip()][-NUM_LAST_LINES:]
    return ParallelError(
        f"fold {job.fold.number} failed with exit code {job.process.returncode}; the last lines of {job.log}:\n"
        + "\n".join(f"  | {line}" for line in last)
    )
