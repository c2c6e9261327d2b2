"""Train in several processes, started by torch's own elastic launcher.

The process that starts them imports as little as it can: they begin when it has, import all that trains, and find what
is wrong with a config by themselves. Only where one of them has failed is the config looked at here, for its own fault
is told as that and not as a process's.
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

__all__ = ["choose_gpus", "count_workers", "train_on"]

logger = logging.getLogger(__name__)


def count_workers(config: ExperimentConfig, num_gpus: int | None = None) -> int:
    """Return how many processes ``volseg train`` starts for a config, on ``num_gpus`` GPUs of this machine in all.

    Raises
    ------
    ConfigError
        If the config cannot be run so, or there are fewer GPUs.
    """
    visible = None if config.device == "cpu" else count_gpus()
    if is_launched():  # the launcher of this process has chosen their number
        visible = visible or None
    return config.count_processes(num_gpus, visible)


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
        from volseg.workflow.interrupts import Interruption  # imports what trains

        interruption = Interruption()
        interruption.take(stopped.sigval)
        interruption.raise_as_signal()
    except VolsegError:
        _require_sound(loaded, resume)
        raise


def _list_components() -> list[str]:
    """Return the options by which the processes know the same components of one's own."""
    # Who has loaded none has not imported this either, which imports what trains.
    own = sys.modules.get("volseg.experiment.own_components")
    return [] if own is None else list(own.components_arguments())


def _require_sound(loaded: ExperimentConfig, resume: bool) -> None:
    """Raise what is wrong with a config itself: it is told by one process and not by each."""
    # They import what trains, which nobody waits for any more.
    from volseg.checkpointing.components import require_components
    from volseg.experiment.building import check_components

    if resume:
        require_components(loaded.folder, resumes=True)
    check_components(loaded)


def _choose_settings(loaded: ExperimentConfig, num_gpus: int, *, resume: bool) -> tuple[list[str], int]:
    """Return the settings by which ``parallel: auto`` is trained on GPUs of this machine, and how many these take.

    Those with which the run was begun, where it goes on with as many GPUs, or with as many as were chosen among then:
    others would take sums in another order. Else those that are forecast to be fastest. Without GPUs, and where nothing
    can be forecast, nothing is set.
    """
    if resume:
        from volseg.checkpointing.compatible import load_mesh  # imports what trains

        if (begun := load_mesh(loaded, num_gpus)) is not None:
            parallel = json.dumps(begun.model_dump(mode="json", exclude_defaults=True))
            logger.info("parallel: auto goes on as the run was begun, with %s", parallel)
            return [f"parallel={parallel}"], begun.num_gpus
    if loaded.device == "cpu" or not count_gpus():
        return [], num_gpus
    # They import what trains, as following it does.
    from volseg.estimate.candidate import name_candidate
    from volseg.experiment.plan_command import find_machine, list_settings, plan_training

    # Here, where all is imported already. Copies of this process ask CUDA, and follow steps: this one lives as long as
    # the training, and would hold memory of a GPU.
    try:
        plan = plan_training(loaded, find_machine(num_gpus=num_gpus, here=True), numbers=False, forks=True)
    except VolsegError as fault:
        logger.warning("parallel: auto leaves the processes to choose, as nothing could be forecast (%s)", fault)
        return [], num_gpus
    if plan.chosen is None:
        logger.warning("parallel: auto leaves the processes to choose, as %s", plan.why)
        return [], num_gpus
    candidate = plan.chosen.candidate
    logger.info("parallel: auto takes %s: %s", name_candidate(candidate), plan.why)
    settings = ["parallel.strategy=none", *list_settings(candidate), f"parallel.chosen_for={num_gpus}"]
    return settings, candidate.num_gpus
