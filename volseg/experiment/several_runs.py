"""Train several runs, each in its own process: the folds of a cross-validation, the trials of a search.

Each process is a plain ``volseg train`` that sees one GPU and knows nothing of the others. A failed run does not affect
the rest. Why not torch's launcher: its processes are one job, which ends when one of them fails.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from volseg.checkpointing.folder import RunFolder
from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError
from volseg.experiment.own_components import components_arguments
from volseg.parallel.devices import is_launched
from volseg.parallel.processes.workers import Worker, WorkerPool, run_queue
from volseg.workflow.interrupts import catch_signals

__all__ = ["PlannedRun", "require_own_folder", "train_each"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, frozen=True, eq=False)
class PlannedRun:
    """A run to train or to resume."""

    name: str
    """Name in messages, such as ``fold 0``."""
    config: ExperimentConfig
    """Config with the folder of the run."""

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.config.folder)


Run = TypeVar("Run", bound=PlannedRun)


def require_own_folder(config: ExperimentConfig, what: str, otherwise: str) -> None:
    """Raise if this process cannot drive several runs.

    Parameters
    ----------
    config : ExperimentConfig
        Its folder will hold the folders of the runs.
    what, otherwise : str
        Name of the work, and advice for a launched process, for messages.

    Raises
    ------
    ConfigError
        If a launcher started this process, or the folder has a single run.
    """
    if is_launched():
        raise ConfigError(f"a {what} starts its own processes (--gpus) and cannot run under torchrun; {otherwise}")
    if RunFolder(config.folder).exists:
        raise ConfigError(
            f"{config.folder} holds a run of one training; choose another folder for the {what} by --output"
        )


def train_each(
    runs: Iterable[Run],
    gpus: Sequence[str | None],
    on_end: Callable[[Run, Worker], None],
    watch: Callable[[Run, Worker], None] | None = None,
) -> None:
    """Train runs, as many at a time as there are GPUs; resume started runs from their checkpoints.

    Ctrl-C and SIGTERM are passed on: each process stops after its batch with a checkpoint.

    Parameters
    ----------
    runs
        Runs in the order of their start; each is requested when a GPU is free.
    gpus
        See `choose_gpus`.
    on_end
        Called with a run and its worker after the worker has ended by itself, not after a signal.
    watch
        Called repeatedly with each run in training.
    """
    components_arguments()  # raises before any process starts
    with (
        catch_signals() as interruption,
        closing(run_queue(runs, gpus, _start, lambda: interruption.signal, watch)) as ended,
    ):
        for run, worker in ended:
            if worker.process.returncode == 0 or not interruption:
                on_end(run, worker)
    interruption.raise_as_signal()


def _start(pool: WorkerPool, run: PlannedRun, gpu: str | None) -> Worker:
    path = run.folder.path
    config_file = dump_config(run.config, path.with_name(f"{path.name}.yaml"))
    command = run_module("volseg", "train", str(config_file), *components_arguments())
    command += ["--resume"] if run.folder.exists else []
    log = path.with_name(f"{path.name}.log")
    worker = pool.start(run.name, command, log, gpu=gpu)
    logger.info("%s: training%s, log %s", run.name, "" if gpu is None else f" on GPU {gpu}", log)
    return worker
