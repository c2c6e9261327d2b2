"""Train in several processes, started by torch's own elastic launcher.

The launching process imports as little as possible: the training processes start after it, import the training code,
and check the config themselves. The config is checked here only after a process has failed, so that the error of the
config is reported, not that of a process.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from volseg.commands import run_module
from volseg.config.loading import load_config
from volseg.config.schema import ExperimentConfig
from volseg.errors import ConfigError, VolsegError
from volseg.parallel.devices import count_gpus, is_launched
from volseg.parallel.processes.launcher import launch

logger = logging.getLogger(__name__)


def count_workers(config: ExperimentConfig, num_gpus: int | None = None) -> int:
    """Return the number of processes that ``volseg train`` starts for a config, on ``num_gpus`` local GPUs in all.

    Raises
    ------
    ConfigError
        If the config cannot run on them, or there are fewer GPUs.
    """
    visible = None if config.device == "cpu" else count_gpus()
    if is_launched():  # the launcher of this process has chosen their number
        visible = visible or None
    return config.count_processes(num_gpus, visible)


def choose_gpus(config: ExperimentConfig, count: int) -> Sequence[str | None]:
    """Return ``count`` values of CUDA_VISIBLE_DEVICES, one per process; None for processes that share the CPU.

    Processes share the CPU with ``device: cpu``, for tests.

    Parameters
    ----------
    config : ExperimentConfig
        Its device and parallel strategy.
    count : int
        Number of processes.

    Raises
    ------
    ConfigError
        If there are fewer GPUs, or the config uses several for each process.
    """
    parallel = config.parallel
    several = parallel.strategy in ("spatial", "pipeline") or parallel.devices is not None
    if parallel.num_gpus > 1 or (several and not parallel.is_on_one_device):
        raise ConfigError(
            f"--gpus {count} starts processes on one GPU each, but parallel.strategy is {parallel.strategy} with "
            f"devices {parallel.devices}, on {parallel.num_gpus} GPU(s); leave out --gpus to use all of them "
            "together"
        )
    if config.device == "cpu":
        return [None] * count
    visible = count_gpus()
    if not visible:
        raise ConfigError(
            f"--gpus {count} needs GPUs, but none is visible; leave it out to use the CPU, or let the processes share "
            "the CPU with --set device=cpu"
        )
    if visible < count:
        raise ConfigError(f"--gpus {count} asks for more than the {visible} GPU(s) that are visible")
    # Within the visible GPUs of the user, which may be names (MIG slices) and need not start at 0.
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(visible)))
    return [name.strip() for name in named.split(",")][:count]


def train_on(
    num_gpus: int | None,
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    max_restarts: int = 0,
) -> None:
    """Run ``volseg train`` in separate processes, one per GPU, or one for the GPUs of a pipeline.

    If a process fails, all processes restart from the last checkpoint, at most ``max_restarts`` times. ``torchrun
    --nproc-per-node N -m volseg train CONFIG`` does the same. With ``device: cpu`` the processes share the CPU, for
    tests.

    Parameters
    ----------
    num_gpus : int or None
        GPUs in all; None for those of the config's mesh.
    config : path
        YAML file of the experiment.
    overrides : sequence of str
        Such as ``training.epochs=5``.
    resume : bool
        Resume from the run folder's newest checkpoint.
    max_restarts : int
        Restarts of all processes after a failure.

    Raises
    ------
    ConfigError
        If the config cannot run on them, or there are fewer GPUs.
    ParallelError
        If a process fails.
    KeyboardInterrupt, SystemExit
        After Ctrl-C or SIGTERM, once the processes have saved and ended.
    """
    loaded = load_config(config, overrides)
    if loaded.parallel.strategy == "auto" and loaded.parallel.num_gpus == 1 and (num_gpus or 1) > 1:
        settings, num_gpus = _choose_settings(loaded, num_gpus or 1, resume=resume)
        overrides = [*overrides, *settings]
        loaded = load_config(config, overrides)
    arguments = [part for assignment in overrides for part in ("--set", assignment)]
    arguments += [*_list_components(), *(["--resume"] if resume else [])]
    try:
        _, *command = run_module("volseg", "train", str(config), *arguments)
        launch(command, count_workers(loaded, num_gpus), max_restarts=max_restarts)
    except SignalException as stopped:  # the launcher has passed the signal on and waited
        from volseg.workflow.checks import Interruption  # imports the training code

        interruption = Interruption()
        interruption.take(stopped.sigval)
        interruption.raise_as_signal()
    except VolsegError:
        _require_sound(loaded, resume)
        raise


def _list_components() -> list[str]:
    """Return the options that load the user's components in the processes."""
    # Without loaded components this module is not imported either, since it imports the training code.
    own = sys.modules.get("volseg.experiment.own_components")
    return [] if own is None else list(own.components_arguments())


def _require_sound(loaded: ExperimentConfig, resume: bool) -> None:
    """Raise an error of the config itself, so that one process reports it instead of all."""
    # These modules import the training code; startup time no longer matters here.
    from volseg.checkpointing.components import require_components
    from volseg.experiment.building import check_components

    if resume:
        require_components(loaded.folder, resumes=True)
    check_components(loaded)


def _choose_settings(loaded: ExperimentConfig, num_gpus: int, *, resume: bool) -> tuple[list[str], int]:
    """Return the settings that train ``parallel: auto`` on GPUs of this machine, and the number of these GPUs.

    A resumed run keeps its settings if it has as many GPUs as at its start, or as many as were chosen then: other
    settings would change the order of sums. Otherwise the settings with the fastest estimate are used. Without GPUs or
    estimates, nothing is set.
    """
    if resume:
        from volseg.checkpointing.compatible import load_mesh  # imports the training code

        if (begun := load_mesh(loaded, num_gpus)) is not None:
            parallel = json.dumps(begun.model_dump(mode="json", exclude_defaults=True))
            logger.info("parallel: auto continues as the run started, with %s", parallel)
            return [f"parallel={parallel}"], begun.num_gpus
    if loaded.device == "cpu" or not count_gpus():
        return [], num_gpus
    # These modules import the training code; so does tracing.
    from volseg.estimate.candidate import name_candidate
    from volseg.experiment.placement.alternatives import list_settings
    from volseg.experiment.placement.plan_command import plan_training, resolve_machine

    # In this process, which has imported all modules. Forks query CUDA and trace steps: this process lives as long as
    # the training, and would hold memory of a GPU.
    try:
        plan = plan_training(loaded, resolve_machine(num_gpus=num_gpus, here=True), numbers=False, forks=True)
    except VolsegError as fault:
        logger.warning("parallel: auto lets the processes choose, because nothing could be estimated (%s)", fault)
        return [], num_gpus
    if plan.chosen is None:
        logger.warning("parallel: auto lets the processes choose, because %s", plan.why)
        return [], num_gpus
    candidate = plan.chosen.candidate
    logger.info("parallel: auto uses %s: %s", name_candidate(candidate), plan.why)
    settings = ["parallel.strategy=none", *list_settings(candidate), f"parallel.chosen_for={num_gpus}"]
    return settings, candidate.num_gpus
