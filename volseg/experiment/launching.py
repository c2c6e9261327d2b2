"""Train with one process per GPU, started by torch's own elastic launcher."""

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from volseg.config.loading import load_config
from volseg.errors import ConfigError
from volseg.experiment.building import check_components
from volseg.parallel.devices import count_gpus
from volseg.parallel.launcher import launch
from volseg.workflow.interrupts import Interruption

__all__ = ["train_on"]


def train_on(
    num_gpus: int, config: Path, overrides: Sequence[str] = (), *, resume: bool = False, max_restarts: int = 0
) -> None:
    """Run ``volseg train`` in ``num_gpus`` processes, which cut each volume among them.

    If one fails, all are started again ``max_restarts`` times, and go on from the last checkpoint.
    ``torchrun --nproc-per-node N -m volseg train CONFIG --set parallel.strategy=spatial`` does the same. On a machine
    without GPUs the processes share the CPU, which is for trying things out.

    Raises
    ------
    ConfigError
        If the config cannot be run so, or there are fewer GPUs.
    ParallelError
        If a process fails.
    KeyboardInterrupt, SystemExit
        After Ctrl-C or SIGTERM, when the processes have saved and ended.
    """
    visible = count_gpus()
    if 0 < visible < num_gpus:
        raise ConfigError(f"--gpus {num_gpus} asks for more than the {visible} GPU(s) that are visible")
    strategy = "parallel.strategy=spatial"
    # Checked here once, so that a fault is told by one process and not by each.
    loaded = load_config(config, [*overrides, strategy])
    check_components(loaded)
    devices = loaded.parallel.devices
    if devices is not None and not loaded.parallel.is_on_one_device:
        raise ConfigError(f"--gpus {num_gpus} starts one process each; leave out parallel.devices, which is {devices}")
    arguments = [part for assignment in (*overrides, strategy) for part in ("--set", assignment)]
    try:
        command = ["-m", "volseg", "train", str(config), *arguments, *(["--resume"] if resume else [])]
        launch(command, num_gpus, max_restarts=max_restarts)
    except SignalException as stopped:  # the launcher has passed the signal on and waited
        interruption = Interruption()
        interruption.take(stopped.sigval)
        interruption.raise_as_signal()
