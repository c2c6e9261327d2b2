"""Trained networks: with their weights, and with what a prediction may still set differently."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from volseg.checkpointing.components import require_components
from volseg.checkpointing.file import CHECKPOINTS, load_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.config.nearest import did_you_mean
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.data.preprocessed import Preprocessing
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.building import build_predictor, preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.files import digest_file
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.predictor import Predictor
from volseg.inference.shared_predictor import SharedPredictor
from volseg.models.weights import load_weights
from volseg.parallel import FastKernels

__all__ = ["PREDICTION_KEYS", "Trained", "load_run", "require_keys"]

PREDICTION_KEYS = (
    "inference",
    "device",
    "parallel",
    "training.precision",
    "training.kernels",
    "training.memory_format",
)
"""What of a config may be another at prediction than at training: how, on what and how exactly it is computed."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Networks with their weights, and all that a prediction needs to know beside them."""

    source: Path
    """What was named: a run folder, a cross-validation's, a file; the first one of several."""
    config: ExperimentConfig
    """With what is overridden for the prediction."""
    task: Task
    preprocessing: Preprocessing
    """Of an image on its way to the networks."""
    models: tuple[nn.Module, ...]
    """In evaluation mode, on the device of the config; of several the probabilities are averaged."""
    weights: str
    """Digest of the files that the weights came from: equal weights, equal digest."""
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    """Along which the networks are mirrored where the config wants them mirrored."""
    kind: type[Predictor] = Predictor
    """By whose rules the networks are applied to whole volumes."""
    postprocessing: Postprocessing | None = None
    """What was measured to help these networks' label maps, if that was done."""

    def build_predictor(self) -> Predictor:
        """Return how the networks are applied to whole volumes."""
        return self._build_predictor(self.models)

    def build_shared_predictor(self, devices: Sequence[torch.device]) -> SharedPredictor:
        """Return how copies of the networks are applied, on each device, to a part of every volume."""
        others = [tuple(_copy_to(model, device) for model in self.models) for device in devices[1:]]
        return SharedPredictor([self._build_predictor(models) for models in (self.models, *others)])

    def _build_predictor(self, models: Sequence[nn.Module]) -> Predictor:
        axes = self.mirror_axes if self.config.inference.mirror else ()
        return build_predictor(self.config, self.task, models, mirror=axes, alone=True, kind=self.kind)


def _copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    if isinstance(model, FastKernels):
        return FastKernels(copy.deepcopy(model.module), device).eval()
    return copy.deepcopy(model).to(device).eval()


def load_run(folder: RunFolder, checkpoint: str = "latest", overrides: Sequence[str] = ()) -> Trained:
    """Build a run's network and load its weights, averaged ones where the training kept them.

    Parameters
    ----------
    folder : RunFolder
        Of the training.
    checkpoint : str
        A key of `CHECKPOINTS`.
    overrides : sequence of str
        Such as ``inference.mirror=false``; see `require_keys`.

    Raises
    ------
    ConfigError
        If the folder is no run, the checkpoint has another name, or the run's devices are not there.
    CheckpointError
        If the checkpoint is absent, damaged, or of another network.
    """
    if checkpoint not in CHECKPOINTS:
        raise ConfigError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    config, task, plan = folder.config(overrides), folder.task(), folder.plan()
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
        load_weights(model, state.model, state.averaged)
    except CheckpointError as fault:
        raise CheckpointError(f"{path} is not of the network in {folder.config_file}: {fault}") from fault
    return Trained(
        source=folder.path,
        config=config,
        task=task,
        preprocessing=preprocessing_of(config),
        models=(model.eval(),),
        weights=digest_file(path),
    )


def require_keys(overrides: Sequence[str], allowed: Sequence[str] = PREDICTION_KEYS) -> None:
    """Raise for an override of what the training has settled.

    Raises
    ------
    ConfigError
        Names the keys that may be set.
    """
    for assignment in overrides:
        key = assignment.partition("=")[0].strip()
        if any(key == name or key.startswith(f"{name}.") for name in allowed):
            continue
        known = [f"{name}.KEY" if name in ("inference", "parallel") else name for name in allowed]
        section = key.partition(".")[0]
        why = (
            f"{section} is as it was trained with"
            if section in ExperimentConfig.model_fields
            else f"unknown key; {did_you_mean(section, allowed)}"
        )
        raise ConfigError(f"--set {assignment}: {why}. What may be set once a network is trained: {', '.join(known)}")


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
