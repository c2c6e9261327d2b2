"""Train in several processes, started by torch's own elastic launcher."""

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.experiment.building import check_components
from volseg.experiment.component_record import require_components
from volseg.experiment.own_components import components_arguments
from volseg.parallel.devices import count_gpus
from volseg.parallel.launcher import launch
from volseg.workflow.interrupts import Interruption

__all__ = ["count_workers", "train_on"]


def count_workers(config: ExperimentConfig, num_gpus: int | None = None) -> int:
    """Return how many processes ``volseg train`` starts for a config, on ``num_gpus`` GPUs of this machine in all.

    Raises
    ------
    ConfigError
        If the config cannot be run so, or there are fewer GPUs.
    """
    visible = 0 if config.device == "cpu" else count_gpus()
    return config.count_processes(num_gpus, visible)


def train_on(
    num_gpus: int | None,
    config: Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    max_restarts: int = 0,
) -> None:
    """Run ``volseg train`` in processes of its own, one per GPU, or one for the GPUs of a pipeline.

    If one fails, all are started again ``max_restarts`` times, and go on from the last checkpoint.
    ``torchrun --nproc-per-node N -m volseg train CONFIG`` does the same. On a machine without GPUs the processes share
    the CPU, which is for trying things out.

    Parameters
    ----------
    num_gpus : int or None
        GPUs in all; None for as many as the config's mesh has.
    config : Path
        YAML file of the experiment.
    overrides : sequence of str
        Such as ``training.epochs=5``.
    resume : bool
        Go on from the run folder's newest checkpoint.
    max_restarts : int
        How often all processes are started again after one has failed.

    Raises
    ------
    ConfigError
        If the config cannot be run so, or there are fewer GPUs.
    ParallelError
        If a process fails.
    KeyboardInterrupt, SystemExit
        After Ctrl-C or SIGTERM, when the processes have saved and ended.
    """
    # Checked here once, so that a fault is told by one process and not by each.
    loaded = load_config(config, overrides)
    if resume:
        require_components(loaded.folder, resumes=True)
    check_components(loaded)
    count = count_workers(loaded, num_gpus)
    arguments = [part for assignment in overrides for part in ("--set", assignment)]
    arguments += [*components_arguments(), *(["--resume"] if resume else [])]
    try:
        command = ["-m", "volseg", "train", str(config), *arguments]
        launch(command, count, max_restarts=max_restarts)
    except SignalException as stopped:  # the launcher has passed the signal on and waited
        interruption = Interruption()
        interruption.take(stopped.sigval)
        interruption.raise_as_signal()
