"""Define the typed config of an experiment, with all its sections.

Every section is frozen and refuses unknown keys (`ConfigModel`); a component is a name and its own parameters. Values
that follow from the data (channels, classes) are not part of a config.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from volseg.config.augmentation import AugmentationConfig
from volseg.config.base import ComponentConfig, ConfigModel, Count, NonNegative, Seed, Sides, Tolerance, validated
from volseg.config.parallel import MeshPlan, ParallelConfig, choose_num_processes, plan_mesh
from volseg.config.sections import (
    KERNELS_OF,
    PREVIOUS_STAGE,
    UNSETTLED_KERNELS,
    DataConfig,
    LossConfig,
    MetricConfig,
    NetworkConfig,
    OptimizerConfig,
    PatchConfig,
    ScheduleConfig,
    SplitConfig,
    TrainingConfig,
)


class InferenceConfig(ConfigModel):
    """Prediction of whole volumes."""

    window: Sides | None = None
    """Sides of the sliding window along D, H, W in voxels; null predicts the whole volume at once."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Fraction of a window that overlaps its neighbour."""
    mirror: bool = False
    """Average the predictions over the eight mirrorings, after the training and in `volseg predict`."""
    batch: Count = 1
    """Volumes of equal size, or without ``window`` mirrorings of one volume, per pass of the network."""
    windows: Count | None = None
    """Windows per pass of the network; null: as many as keep the GPU busy and fit its memory, one on a CPU."""
    record: bool = True
    """Record the pass of a batch of windows as a CUDA graph and replay it, after the training and in `volseg predict`;
    ``training.kernels: auto`` can then use the fast kernels there too."""
    skip_background: bool = False
    """Count windows in which the preprocessed image has one value, such as clipped air, as background, without a pass
    of the network. Not for structures of uniform intensity."""
    keep_largest: tuple[str, ...] = ()
    """Labels or regions that keep only their largest component in each label map, also in validations. The steps of
    `volseg postprocess` follow it."""


class EvaluationConfig(ConfigModel):
    """Measurements per case and label in a validation, besides Dice, IoU, counts and volumes."""

    distances: bool = True
    """Measure HD95, HD and ASSD in mm, and NSD if it has a tolerance."""
    tolerance: Tolerance | dict[str, Tolerance] | None = None
    """Tolerance of NSD in mm, one for all labels or one per label name; null uses the task manifest's, if any."""
    lesions: tuple[str, ...] = ()
    """Labels that mark lesions; the validation counts the lesions found."""
    lesion_overlap: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Smallest intersection over union (IoU) at which a predicted lesion counts as true."""


class LoggingConfig(ConfigModel):
    """Loggers of a training's metrics; ``history.jsonl``, ``status.json`` and ``times.json`` are always written."""

    loggers: tuple[ComponentConfig, ...] = (ComponentConfig(name="tensorboard"),)
    """``tensorboard``, ``wandb`` (pip install wandb), ``mlflow`` (pip install mlflow-skinny) or custom loggers, as
    names or names with parameters: ``[tensorboard, {name: wandb, mode: offline}]``. ``[]`` for none."""
    channel: NonNegative | str = 0
    """Image channel in the pictures of loggers and report: a number from 0, or a name in the data set, such as
    ``T2``."""

    @field_validator("loggers", mode="before")
    @classmethod
    def _take_names(cls, loggers: Any) -> Any:
        """Accept a plain name for a logger without parameters."""
        if not isinstance(loggers, Sequence) or isinstance(loggers, str):
            return loggers
        return [{"name": logger} if isinstance(logger, str) else logger for logger in loggers]


class ExperimentConfig(ConfigModel):
    """One training: from a folder of cases to a validated network."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the experiment and of its run folder."""
    output: Path | None = None
    """Run folder; null means ``runs/NAME``."""
    seed: Seed = 12345
    """Seed of all random numbers except the folds (``split.seed``)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the computation; ``auto`` uses GPUs if there are any."""
    data: DataConfig
    """Location and storage of the cases."""
    split: SplitConfig = SplitConfig()
    """Split of the cases into training and validation."""
    preprocessing: tuple[ComponentConfig, ...] = (ComponentConfig(name="Orientation"), ComponentConfig(name="ZScore"))
    """Preprocessing of every image before patches are drawn, in order."""
    patch: PatchConfig
    """Training patches."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Random augmentation of training batches, in the order of application."""
    network: NetworkConfig
    """The network, and its own parameters; channels and classes follow from the data."""
    losses: Annotated[tuple[LossConfig, ...], Field(min_length=1)] = (LossConfig(name="DiceCELoss"),)
    """Terms of the objective, which is their sum."""
    metrics: tuple[MetricConfig, ...] = ()
    """Further metrics of the validation, besides Dice."""
    optimizer: OptimizerConfig
    """The optimizer, and its own parameters, such as ``lr``."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the course of the training."""
    training: TrainingConfig = TrainingConfig()
    """The training loop."""
    hooks: tuple[ComponentConfig, ...] = ()
    """Custom hooks, called after the framework's."""
    inference: InferenceConfig = InferenceConfig()
    """Prediction of whole volumes."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Measurements per case and label in a validation."""
    logging: LoggingConfig = LoggingConfig()
    """Loggers of a training's metrics and pictures, besides the run folder."""
    parallel: ParallelConfig = ParallelConfig()
    """Use of several devices by one training; ``auto`` chooses."""

    @model_validator(mode="after")
    def _stage_is_whole(self) -> "ExperimentConfig":
        if (self.data.previous_stage is None) == bool(self.stage_labels):
            raise ValueError(
                "a cascade needs data.previous_stage and, as the last step of preprocessing, {name: PreviousStage, "
                "labels: [1, ...]}; `volseg configure --preset cascade` writes both"
            )
        return self

    @model_validator(mode="after")
    def _training_is_of_one_mind(self) -> "ExperimentConfig":
        kernels, strategy = self.training.kernels, self.parallel.model_strategy
        if kernels not in KERNELS_OF[strategy]:
            raise ValueError(
                f"training.kernels is {kernels}, but parallel.strategy: {strategy} supports only "
                f"{' or '.join(KERNELS_OF[strategy])}"
            )
        if self.training.deterministic and kernels in UNSETTLED_KERNELS:
            raise ValueError(
                f"training.kernels is {kernels}, which chooses kernels by their measured time, but "
                "training.deterministic: true promises the same bits each time; set kernels to auto, fast or torch"
            )
        if self.training.patience is not None and self.training.validate_every is None:
            raise ValueError("training.patience needs validations, but training.validate_every is null; leave out one")
        return self

    @model_validator(mode="after")
    def _training_goes_with_its_devices(self) -> "ExperimentConfig":
        if self.patch.growth and self.parallel.may_cut:
            raise ValueError(
                "patch.growth changes the size of volumes, but parallel divides volumes or layers between devices for "
                "one size; train without patch.growth, or on whole volumes (set parallel.data and, to recompute "
                "activations, parallel.strategy: spatial with parallel.devices: 1 or parallel.spatial: 1)"
            )
        data, batch = self.parallel.data, self.patch.batch
        if data is not None and data > batch:
            raise ValueError(
                f"parallel.data is {data}, but patch.batch is {batch}, the samples of all replicas together; set "
                f"parallel.data to at most {batch}, or increase patch.batch"
            )
        if self.training.deterministic and self.parallel.on_oom == "replan":
            raise ValueError(
                "parallel.on_oom: replan may change kernels or mesh within a run, but training.deterministic: true "
                "promises the same bits in the whole run; leave out one of them"
            )
        return self

    def with_values(self, **sections: Mapping[str, Any]) -> "ExperimentConfig":
        """Return the config with unchecked new values in some sections, such as ``patch={"batch": 1}``."""
        changed = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=changed)

    def on_one_device(self, num_processes: int = 1) -> "ExperimentConfig":
        """Return the config for ``num_processes`` with one device each; a single process does not cut volumes."""
        parallel = self.parallel.model_copy(update={"devices": 1})
        cuts_nothing = num_processes == 1 and parallel.only_chooses_kernels
        return self.model_copy(update={"parallel": ParallelConfig() if cuts_nothing else parallel})

    def count_processes(self, num_gpus: int | None, visible: int | None) -> int:
        """Return the number of processes on ``num_gpus`` of the ``visible`` GPUs; see `choose_num_processes`."""
        fixed_order = self.training.deterministic
        return choose_num_processes(
            self.parallel, num_gpus, visible, batch_size=self.patch.batch, fixed_order=fixed_order
        )

    def mesh(self, num_processes: int) -> MeshPlan:
        """Return the mesh of a training on ``num_processes``; see `plan_mesh`."""
        fixed_order = self.training.deterministic
        return plan_mesh(self.parallel, num_processes, batch_size=self.patch.batch, fixed_order=fixed_order)

    def with_mesh(self, plan: MeshPlan) -> "ExperimentConfig":
        """Return the config with the numbers of replicas and slabs of a plan.

        Raises
        ------
        ConfigError
            If other values of the config exclude these numbers.
        """
        parallel = {**self.parallel.model_dump(), "data": plan.data, "spatial": plan.spatial}
        source = f"parallel.data: {plan.data} and parallel.spatial: {plan.spatial}, as the processes require,"
        return validated(ExperimentConfig, {**self.model_dump(), "parallel": parallel}, source)

    def located(self) -> "ExperimentConfig":
        """Return the config with absolute paths to its input files and cache."""
        stage = self.data.previous_stage
        cache, file, start = self.data.cache, self.split.file, self.training.start_from
        return self.with_values(
            data={
                "root": _absolute(self.data.root),
                "previous_stage": stage and _absolute(stage),
                "cache": cache if cache in ("auto", "none") else str(_absolute(Path(cache))),
            },
            split={"file": file and _absolute(file)},
            training={"start_from": start and _absolute(start)},
        )

    @property
    def stage_labels(self) -> tuple[int, ...]:
        """Values of the previous stage's label maps; each becomes a further channel of the images."""
        steps = [step.spec() for step in self.preprocessing]
        return tuple(steps[-1].get("labels", ())) if steps and steps[-1]["name"] == PREVIOUS_STAGE else ()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.output if self.output is not None else Path("runs") / self.name


def _absolute(path: Path) -> Path:
    # Links are not resolved, since they may point to another disk later.
    return Path(os.path.abspath(path))
