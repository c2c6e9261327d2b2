"""Train in several processes, started by torch's own elastic launcher."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.experiment.building import check_components
from volseg.experiment.component_record import require_components
from volseg.experiment.own_components import components_arguments
from volseg.experiment.what_fits import list_settings
from volseg.parallel.candidates.report import PlanReport
from volseg.parallel.devices import count_gpus, is_launched
from volseg.parallel.launcher import launch
from volseg.workflow.interrupts import Interruption

__all__ = ["count_workers", "train_on"]

logger = logging.getLogger(__name__)


def count_workers(config: ExperimentConfig, num_gpus: int | None = None) -> int:
    """Return how many processes ``volseg train`` starts for a config, on ``num_gpus`` GPUs of this machine in all.

    Raises
    ------
    ConfigError
        If the config cannot be run so, or there are fewer GPUs.
    """
    visible = None if config.device == "cpu" else count_gpus()
    if is_launched():  # whoever started this process chose how many there are
        visible = visible or None
    return config.count_processes(num_gpus, visible)


def train_on(
    num_gpus: int | None,
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    max_restarts: int = 0,
) -> None:
    """Run ``volseg train`` in processes of its own, one per GPU, or one for the GPUs of a pipeline.

    If one fails, all are started again ``max_restarts`` times, and go on from the last checkpoint.
    ``torchrun --nproc-per-node N -m volseg train CONFIG`` does the same. With ``device: cpu`` the processes share the
    CPU, which is for trying things out.

    Parameters
    ----------
    num_gpus : int or None
        GPUs in all; None for as many as the config's mesh has.
    config : path
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
    if not resume and loaded.parallel.strategy == "auto" and loaded.parallel.num_gpus == 1 and (num_gpus or 1) > 1:
        settings, num_gpus = _choose_settings(loaded, config, overrides, num_gpus or 1)
        overrides = [*overrides, *settings]
        loaded = load_config(config, overrides)
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


def _choose_settings(
    loaded: ExperimentConfig, config: str | Path, overrides: Sequence[str], num_gpus: int
) -> tuple[list[str], int]:
    """Return the settings that are forecast to be fastest on GPUs of this machine, and how many of these they take.

    A process of its own forecasts, for it asks CUDA what the GPUs are: here that would hold memory of one of them as
    long as the training lasts. Without GPUs, and where nothing can be forecast, nothing is set.
    """
    if loaded.device == "cpu" or not count_gpus():
        return [], num_gpus
    arguments = [part for assignment in overrides for part in ("--set", assignment)]
    command = [sys.executable, "-m", "volseg", "plan", str(config), "--here", "--gpus", str(num_gpus), "--json"]
    told = subprocess.run(  # noqa: S603 (our own verb)
        [*command, *arguments, *components_arguments()], capture_output=True, text=True, encoding="utf-8", check=False
    )
    if told.returncode:
        last = (told.stderr.strip().splitlines() or ["nothing fits"])[-1]
        logger.warning("parallel: auto leaves the processes to choose, as nothing could be forecast (%s)", last)
        return [], num_gpus
    report = PlanReport.model_validate_json(told.stdout)
    row = next(each for each in report.candidates if each.state == "chosen")
    logger.info("parallel: auto takes %s: %s", row.name, report.why)
    return ["parallel.strategy=none", *list_settings(row.candidate)], row.num_gpus
