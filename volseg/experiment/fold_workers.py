"""Spread the folds of a cross-validation over GPUs: one process per fold, one fold at a time per GPU.

Each process is a plain ``volseg train`` that sees one GPU and knows nothing of the others; a fold that fails leaves the
rest alone. Why not torch's launcher: its processes are one job, which ends when one of them fails.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing

from volseg.commands import run_module
from volseg.config.loading import dump_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError, ParallelError
from volseg.experiment.folds import Fold
from volseg.experiment.own_components import components_arguments
from volseg.parallel.devices import count_gpus
from volseg.parallel.processes.workers import Worker, WorkerPool, run_queue
from volseg.workflow.interrupts import catch_signals

__all__ = ["choose_gpus", "train_in_processes"]

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
    failures: dict[int, ParallelError] = {}
    with (
        catch_signals() as interruption,
        closing(run_queue(folds, gpus, _start, lambda: interruption.signal)) as ended,
    ):
        for fold, worker in ended:
            if worker.process.returncode == 0:
                on_finished(fold, worker.seconds)
            elif not interruption:
                failures[fold.number] = ParallelError(worker.describe_end(str(worker.log)))
                logger.error("%s", failures[fold.number])
    interruption.raise_as_signal()
    return failures


def _start(pool: WorkerPool, fold: Fold, gpu: str | None) -> Worker:
    folder = fold.config.folder
    config_file = dump_config(fold.config, folder.with_name(f"{folder.name}.yaml"))
    command = run_module("volseg", "train", str(config_file), *components_arguments())
    command += ["--resume"] if fold.folder.exists else []
    log = folder.with_name(f"{folder.name}.log")
    worker = pool.start(f"fold {fold.number}", command, log, gpu=gpu)
    logger.info("fold %d: training on %s, log %s", fold.number, "CPU" if gpu is None else f"GPU {gpu}", log)
    return worker
