"""Networks of a source before they are built, and trained networks with the settings of a prediction."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from torch import Tensor, nn

from volseg.checkpointing.components import require_components
from volseg.checkpointing.file import CHECKPOINTS, load_checkpoint
from volseg.checkpointing.folder import RunFolder
from volseg.config.schema import ExperimentConfig
from volseg.data.case_store.preprocessed import Preprocessing
from volseg.data.cases import Task
from volseg.errors import CheckpointError, ConfigError
from volseg.experiment.building import build_predictor, preprocessing_of
from volseg.experiment.network_plan import NetworkPlan
from volseg.experiment.placement.placed_network import build_model, choose_device
from volseg.files import digest_file
from volseg.inference.postprocessing import Postprocessing
from volseg.inference.predictor import Predictor, SharedPredictor
from volseg.models.weights import load_weights
from volseg.parallel import FastKernels
from volseg.planning.geometry import Like

PREDICTION_KEYS = (
    "inference",
    "device",
    "parallel",
    "training.precision",
    "training.kernels",
    "training.memory_format",
    "data.previous_stage",
)
"""Keys of a config that a prediction may change; ``data.previous_stage`` is the folder of a cascade's first stage."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Networks with their weights, and the other parts of a prediction."""

    source: Path
    """The source: a run folder, a cross-validation's folder, a file; the first of several."""
    config: ExperimentConfig
    """Config with the overrides of the prediction."""
    spec: Mapping[str, Any]
    """Name and all parameters of the network."""
    task: Task
    preprocessing: Preprocessing
    """Preprocessing of an image."""
    models: tuple[nn.Module, ...]
    """In evaluation mode, on the device of the config; the probabilities of several models are averaged."""
    weights: str
    """Digest of the weights' files: equal weights, equal digest."""
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    """Axes of the mirrorings, if the config mirrors."""
    kind: type[Predictor] = Predictor
    """Class that applies the networks to whole volumes."""
    postprocessing: Postprocessing | None = None
    """Measured postprocessing of these networks' label maps, if there is any."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that label maps depend on, in addition to the weights; equal for the networks of one ensemble."""
        values, task = self.config.model_dump(mode="json"), self.task
        settings = {
            "channels": task.modalities,
            "labels": [(value, task.labels[value]) for value in task.class_values],
            "regions": list(task.regions.items()),  # in the order of the networks' outputs
            "outputs": self.config.network.outputs,
            "precision": self.config.training.precision,
            "preprocessing": getattr(self.preprocessing, "components", values["preprocessing"]),
            "inference": values["inference"],
            "rules": (self.kind.__name__, self.mirror_axes),
        }
        return dict(to_jsonable_python(settings))

    def build_predictor(self) -> Predictor:
        """Return the predictor of the networks for whole volumes."""
        return self._build_predictor(self.models)

    def build_shared_predictor(self, devices: Sequence[torch.device]) -> SharedPredictor:
        """Return the predictor with a copy of the networks on each device, for a part of every volume each."""
        others = [tuple(_copy_to(model, device) for model in self.models) for device in devices[1:]]
        return SharedPredictor([self._build_predictor(models) for models in (self.models, *others)])

    def _build_predictor(self, models: Sequence[nn.Module]) -> Predictor:
        # A network for slices is invariant to mirroring their order.
        axes = [axis for axis in self.mirror_axes if self.config.patch.size[axis] > 1]
        axes = axes if self.config.inference.mirror else []
        return build_predictor(self.config, self.task, models, mirror=axes, exclusive=True, kind=self.kind)


def _copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    if isinstance(model, FastKernels):
        return FastKernels(copy.deepcopy(model.module), device).eval()
    return copy.deepcopy(model).to(device).eval()


@dataclass(frozen=True, kw_only=True)
class SourceNetwork:
    """A network of a source: its weights, and the source's facts about it. Nothing is built yet."""

    source: Path
    """Path that names only this network: a run folder, a fold, a file."""
    file: Path
    """File of the weights, for messages."""
    values: Mapping[str, Any]
    """A ``state_dict``."""
    average: Mapping[str, Tensor] | None = None
    """Average of the parameters, if the training kept one."""
    written: Mapping[str, Any] | None = None
    """The values under the names of the program that wrote them, if these differ."""
    digest: str
    """Digest of the weights and of files that affect predictions."""
    config: ExperimentConfig | None = None
    """Config with the overrides of a prediction; None for weights only, which cannot predict."""
    unknown: str = "no config describes the preprocessing and the network"
    """Reason for the lack of a config."""
    task: Task | None = None
    plan: NetworkPlan = field(default_factory=NetworkPlan)
    preprocessing: Preprocessing | None = None
    axcodes: str | None = None
    """Directions of the network's axes, if the config's preprocessing has no step for them. nnU-Net reads the axes of a
    file slowest first; in most files they point to the right, to the front and to the head."""
    run: RunFolder | None = None
    """Folder of the run, if ``volseg train`` trained the network."""
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    kind: type[Predictor] = Predictor
    postprocessing: Postprocessing | None = None

    def list_cases(self) -> frozenset[str]:
        """Return the known cases that the network was trained on."""
        known = self.run is not None and self.run.split_file.exists()
        return frozenset(self.run.split().training) if known and self.run is not None else frozenset()

    def require_config(self) -> tuple[ExperimentConfig, Task]:
        """Return config and task.

        Raises
        ------
        ConfigError
            If the source has only weights.
        """
        if self.config is None or self.task is None:
            raise ConfigError(
                f"{self.file} contains only weights: {self.unknown}. Name a run folder, a file of volseg export or a "
                "model folder of nnU-Net 2. A training can start from such weights (training.start_from)"
            )
        return self.config, self.task

    def as_like(self) -> Like:
        """Return the values for the plan of another training, so that the weights fit.

        Raises
        ------
        ConfigError
            If the source has only weights, or was trained on the axes of its files.
        """
        config, _ = self.require_config()
        steps = (component.spec() for component in config.preprocessing)
        turned = next((step.get("axcodes", "RAS") for step in steps if step["name"] == "Orientation"), None)
        axcodes = turned if self.axcodes is None else self.axcodes
        if axcodes is None:
            raise ConfigError(
                f"{self.source} was trained on the axes of its files: its preprocessing has no Orientation step, so a "
                "plan for other files cannot use its network; train it again with Orientation"
            )
        network = self.plan.complete(config).network
        outputs = {} if network.outputs == ("logits",) else {"outputs": list(network.outputs)}
        return Like(
            source=str(self.source.absolute()),
            network={**network.spec(), **outputs},
            patch=config.patch.size,
            batch=config.patch.batch,
            spacing=self.plan.spacing,
            axcodes=axcodes,
        )

    def build(self) -> Trained:
        """Build the network on its device and load the weights, averaged ones if there are any.

        Raises
        ------
        ConfigError
            If there is no config, or components or devices are missing here.
        CheckpointError
            If the weights are of another network.
        """
        config, task = self.require_config()
        if self.run is not None:
            require_components(self.run.path, resumes=False)
        complete = self.plan.complete(config)
        try:
            model = build_model(complete, task, choose_device(config), trains=False)
        except ConfigError as fault:  # this machine is not that of the training
            where = f"the config of {self.source}" if self.run is None else self.run.config_file
            raise ConfigError(f"{fault} (in {where})") from fault
        try:
            load_weights(model, self.values, self.average)
        except CheckpointError as fault:
            raise CheckpointError(f"{self.file} does not fit the network in its config: {fault}") from fault
        return Trained(
            source=self.source,
            config=config,
            spec=complete.network.spec(),
            task=task,
            preprocessing=preprocessing_of(config) if self.preprocessing is None else self.preprocessing,
            models=(model.eval(),),
            weights=self.digest,
            mirror_axes=self.mirror_axes,
            kind=self.kind,
            postprocessing=self.postprocessing,
        )


def require_checkpoint(name: str) -> None:
    """Raise for a name that is not a key of `CHECKPOINTS`."""
    if name not in CHECKPOINTS:
        raise ConfigError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {name!r}")


def open_run(folder: RunFolder, checkpoint: str | Path = "latest", overrides: Sequence[str] = ()) -> SourceNetwork:
    """Read a run's description of its network, and the weights of a checkpoint.

    Parameters
    ----------
    folder : RunFolder
        Folder of the training.
    checkpoint : str or path
        A key of `CHECKPOINTS`, or one of the run's checkpoint files.
    overrides : sequence of str
        Such as ``inference.mirror=false``; see `require_keys`.

    Raises
    ------
    ConfigError
        If the folder is not a run, or there is no such key.
    CheckpointError
        If the checkpoint is absent or damaged.
    """
    if not isinstance(checkpoint, Path):
        require_checkpoint(checkpoint)
    config = folder.config(overrides)
    path = checkpoint if isinstance(checkpoint, Path) else folder.checkpoints / CHECKPOINTS[checkpoint]
    try:
        state = load_checkpoint(path, "cpu")
    except CheckpointError as fault:
        others = [
            name for name, file in CHECKPOINTS.items() if file != path.name and (folder.checkpoints / file).exists()
        ]
        hint = f". Another checkpoint exists: --checkpoint {' or '.join(others)}" if others else ""
        raise CheckpointError(f"{fault}{hint}") from fault
    return SourceNetwork(
        source=folder.path,
        file=path,
        values=state.model,
        average=state.averaged,
        digest=digest_file(path),
        config=config,
        task=folder.task(),
        plan=folder.plan(),
        run=folder,
    )


def require_keys(overrides: Sequence[str], allowed: Sequence[str] = PREDICTION_KEYS) -> None:
    """Raise for an override of a value that the training has fixed.

    Raises
    ------
    ConfigError
        If a key may not be set; names the keys that may be.
    """
    for assignment in overrides:
        key = str(assignment).partition("=")[0].strip()
        if not any(key == name or key.startswith(f"{name}.") for name in allowed):
            raise ConfigError(
                f"--set {assignment} does not apply to a trained network; keys that do: {', '.join(allowed)}"
            )
