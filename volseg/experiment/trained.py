"""Trained networks, out of their run folders."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.building import build_model, choose_device
from volseg.experiment.component_record import require_components
from volseg.experiment.run_folder import RunFolder
from volseg.files import digest_file
from volseg.workflow.averaging import load_averaged
from volseg.workflow.checkpoints import BEST, LATEST, PREVIOUS, load_checkpoint

__all__ = ["CHECKPOINTS", "Trained", "load_trained"]

CHECKPOINTS = {"latest": LATEST, "best": BEST, "previous": PREVIOUS}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Networks with their weights, and all that a prediction needs to know beside them."""

    source: Path
    """What was named: a run folder."""
    config: ExperimentConfig
    task: Task
    models: tuple[nn.Module, ...]
    """In evaluation mode, on the device of the config; of several the probabilities are averaged."""
    weights: str
    """Digest of the files that the weights came from: equal weights, equal digest."""


def load_trained(folder: RunFolder, checkpoint: str = "latest") -> Trained:
    """Build the run's network and load its weights, averaged ones where the training kept them.

    Raises
    ------
    ConfigError
        If the folder is no run, the checkpoint has another name, or the run's devices are not there.
    CheckpointError
        If the checkpoint is absent, damaged, or of another network.
    """
    if checkpoint not in CHECKPOINTS:
        raise ConfigError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    config, task, plan = folder.config(), folder.task(), folder.plan()
    require_components(folder.path, resumes=False)
    path = folder.checkpoints / CHECKPOINTS[checkpoint]
    try:
        state = load_checkpoint(path, "cpu")
    except CheckpointError as fault:
        raise CheckpointError(f"{fault}{_name_others(folder, checkpoint)}") from fault
    try:
        model = build_model(plan.complete(config), task, choose_device(config), trains=False)
    except ConfigError as fault:  # this machine is another one than that of the training
        raise ConfigError(f"{fault} (in {folder.config_file})") from fault
    try:
        load_averaged(model, state)
    except (KeyError, RuntimeError) as fault:
        raise CheckpointError(f"{path} is not of the network in {folder.config_file}: {fault}") from fault
    return Trained(source=folder.path, config=config, task=task, models=(model.eval(),), weights=digest_file(path))


def _name_others(folder: RunFolder, checkpoint: str) -> str:
    """Return how to take another checkpoint: other weights are never taken in silence."""
    ways = []
    for other in CHECKPOINTS.keys() - {checkpoint}:
        try:
            state = load_checkpoint(folder.checkpoints / CHECKPOINTS[other])
        except CheckpointError:
            continue  # no way out
        epoch, batch = state.progress
        ways.append(f"{CHECKPOINTS[other]}, of epoch {epoch} and batch {batch}, by --checkpoint {other}")
    return f". What can be used: {'; or '.join(sorted(ways))}" if ways else ""
