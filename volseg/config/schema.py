"""The whole of an experiment, typed.

Every section is frozen and refuses unknown keys (`ConfigModel`); a component is a name and its own parameters. What
follows from the data (channels, classes) is not written here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from volseg.config.augmentation import AugmentationConfig
from volseg.config.base import ConfigModel, find_absurd_number, validated
from volseg.config.parallel import MeshPlan, ParallelConfig, choose_num_processes, plan_mesh

__all__ = [
    "AugmentationConfig",
    "ComponentConfig",
    "DataConfig",
    "ExperimentConfig",
    "InferenceConfig",
    "LossConfig",
    "MetricConfig",
    "ParallelConfig",
    "PatchConfig",
    "ScheduleConfig",
    "SplitConfig",
    "TrainingConfig",
]

Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Sides = tuple[Count, Count, Count]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What Python's, NumPy's and torch's generators all take."""
Weight = Annotated[float, Field(allow_inf_nan=False)]


class ComponentConfig(BaseModel):
    """A component: its name in the registry of its kind, and parameters of its own."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: str

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> Self:
        """Refuse what no component can mean; parameters have no fields that could say so."""
        for name, value in (self.model_extra or {}).items():
            if (absurd := find_absurd_number(value)) is not None:
                raise ValueError(f"{name} must be a finite number of 64 bits at most, got {absurd!r}")
        return self

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as a registry takes them."""
        return {"name": self.name, **(self.model_extra or {})}


class LossConfig(ComponentConfig):
    """One term of the objective; several are added up with their weights."""

    weight: Weight = 1.0
    inputs: tuple[str, ...] = ("logits", "label")
    output: str = "loss"
    """Name of the term's scalar; among several terms each needs its own, and ``loss`` is their sum."""


class MetricConfig(ComponentConfig):
    """A further metric of the validation, beside Dice: of the foreground, on the original grid, in mm."""

    inputs: tuple[str, ...] = ("pred", "label")
    output: str
    """Name of the number in TensorBoard and in the records."""


class DataConfig(ConfigModel):
    """Where the cases are and how they are kept."""

    root: Path
    """Folder of a data set (MSD's, nnU-Net's, pairs of images and labels), or one level above or below it; or a table
    of paths (CSV)."""
    skip_bad: bool = False
    """Leave bad cases out and list them in the report, instead of stopping before the training."""
    keep: Literal["auto", "device", "memory"] = "auto"
    """Where the preprocessed cases lie: on the GPU when they fit, or in main memory."""


class SplitConfig(ConfigModel):
    """Which cases train and which validate."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: the cases of one fold. ``none``: train on every case, validate on none."""
    fold: NonNegative = 0
    num_folds: Annotated[int, Field(ge=2)] = 5
    seed: Seed = 12345
    """nnU-Net's: KFold(5, shuffle=True, random_state=12345) over the sorted case ids."""
    file: Path | None = None
    """A split file of your own in nnU-Net's form, ``[{"train": [...], "val": [...]}, ...]``; ``fold`` chooses in it.
    Without it, a table's own columns ``fold`` or ``split`` count."""

    @model_validator(mode="after")
    def _fold_exists(self) -> "SplitConfig":
        if self.file is None and self.fold >= self.num_folds:
            raise ValueError(f"fold must be below num_folds={self.num_folds}, got {self.fold}")
        return self


class PatchConfig(ConfigModel):
    """Training patches."""

    size: Sides
    """Extent along D, H, W (voxels after preprocessing)."""
    batch: Count = 2
    """Patches per batch."""
    foreground: Fraction = 0.33
    """Fraction of a batch's patches that surely hold foreground."""


class ScheduleConfig(ConfigModel):
    """Learning rate over the training."""

    name: str = "polynomial"
    power: float | None = None
    floor: float | None = None
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training over which the rate rises linearly to its peak."""

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of schedules takes them."""
        return self.model_dump(exclude_none=True, exclude={"warmup"})


class TrainingConfig(ConfigModel):
    """The loop."""

    renamed: ClassVar[Mapping[str, str]] = {"training.capture": "training.record"}

    epochs: Count = 100
    iterations: Count = 250
    """Batches per epoch."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    clip: Positive | None = 12.0
    """Largest norm of the gradient."""
    accumulate: Count = 1
    """Batches per optimizer step."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the weights, which is then what is validated and predicted with."""
    validate_every: Count = 10
    """Epochs between validations; the last epoch is always validated."""
    patience: Count | None = None
    """Validations without a better Dice after which the training stops."""
    kernels: Literal["auto", "fast", "torch"] = "auto"
    """Kernels of a network on one GPU: ``fast`` are this package's, which ``parallel.strategy: spatial`` runs on every
    GPU too; ``torch`` are torch's and cuDNN's. Both compute the same up to round-off, and runs of either are resumed,
    validated and predicted with by the other. ``auto`` takes the fast ones where they pay: on a GPU that has them, in a
    training whose step is recorded and computed in bfloat16, for a network whose functions all have a form among them;
    elsewhere torch's, and says why. ``fast`` is refused where it cannot be had."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of weights and activations on a GPU; auto measures which is faster for this network and patch, or takes
    contiguous in deterministic mode. The fast kernels have a layout of their own, channels last, whatever this says."""
    record: bool = True
    """Record the training step as a CUDA graph where it can be."""
    deterministic: bool = False
    """The same seed on the same GPU gives the same bits; an operator that cannot is refused. Costs time, but not with
    the fast kernels, which sum in one order anyway."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 5.0
    """Time between two writings of the latest checkpoint, in the middle of an epoch too: what a crash can cost."""
    spot: Literal["none", "aws"] = "none"
    """Whose notices that the machine will be taken away are heeded: ``aws`` asks the instance's metadata service every
    5 s, and saves and ends with status 143 when it says so."""


class InferenceConfig(ConfigModel):
    """How a whole volume is predicted."""

    window: Sides | None = None
    """Sides of the sliding window in voxels; null predicts the whole volume at once."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Fraction of a window that its neighbour covers too."""
    mirror: bool = False
    """Average the predictions over the eight mirrorings, after the training and in `volseg predict`."""
    batch: Count = 1
    """Volumes of equal size that go through the network together."""


KERNELS_OF = {
    "none": ("auto", "fast", "torch"),
    "spatial": ("auto", "fast"),
    "pipeline": ("auto", "torch"),
    "auto": ("auto",),
}
"""Which ``training.kernels`` each ``parallel.strategy`` can run; only without one is there a choice."""


class ExperimentConfig(ConfigModel):
    """One training: from a folder of cases to a validated network."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Of the experiment; names the run folder."""
    output: Path | None = None
    """Run folder; null means ``runs/NAME``."""
    seed: Seed = 12345
    """Everything random follows from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataConfig
    split: SplitConfig = SplitConfig()
    preprocessing: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="Orientation"),
        ComponentConfig(name="ZScore"),
    )
    patch: PatchConfig
    augmentation: AugmentationConfig = AugmentationConfig()
    network: ComponentConfig
    losses: Annotated[tuple[LossConfig, ...], Field(min_length=1)] = (LossConfig(name="DiceCELoss"),)
    metrics: tuple[MetricConfig, ...] = ()
    optimizer: ComponentConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    inference: InferenceConfig = InferenceConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _strategy_has_these_kernels(self) -> "ExperimentConfig":
        kernels, strategy = self.training.kernels, self.parallel.model_strategy
        if kernels not in KERNELS_OF[strategy]:
            raise ValueError(
                f"training.kernels is {kernels}, which parallel.strategy: {strategy} does not run; it takes "
                f"{' or '.join(KERNELS_OF[strategy])}"
            )
        return self

    @model_validator(mode="after")
    def _replicas_have_samples(self) -> "ExperimentConfig":
        data, batch = self.parallel.data, self.patch.batch
        if data is not None and data > batch:
            raise ValueError(
                f"parallel.data is {data} and patch.batch {batch}: each replica needs a sample of the batch, which is "
                "that of all together"
            )
        return self

    def on_one_device(self, num_processes: int = 1) -> "ExperimentConfig":
        """Return the config for one device of each of ``num_processes``; nothing is cut where that is one process."""
        parallel = self.parallel.model_copy(update={"devices": 1})
        cuts_nothing = num_processes == 1 and parallel.only_chooses_kernels
        return self.model_copy(update={"parallel": ParallelConfig() if cuts_nothing else parallel})

    def count_processes(self, num_gpus: int | None, visible: int) -> int:
        """Return how many processes train on ``num_gpus`` of the ``visible`` GPUs; see `choose_num_processes`."""
        fixed_order = self.training.deterministic
        return choose_num_processes(
            self.parallel, num_gpus, visible, batch_size=self.patch.batch, fixed_order=fixed_order
        )

    def mesh(self, num_processes: int, *, fits: bool = True) -> MeshPlan:
        """Return who does what in a training of ``num_processes``; see `plan_mesh`."""
        fixed_order = self.training.deterministic
        return plan_mesh(self.parallel, num_processes, batch_size=self.patch.batch, fixed_order=fixed_order, fits=fits)

    def with_mesh(self, plan: MeshPlan) -> "ExperimentConfig":
        """Return the config with what it left open about replicas and slabs.

        Raises
        ------
        ConfigError
            If its other values do not go with that.
        """
        parallel = {**self.parallel.model_dump(), "data": plan.data, "spatial": plan.spatial}
        source = f"parallel.data: {plan.data} and parallel.spatial: {plan.spatial}, which the processes come to,"
        return validated(ExperimentConfig, {**self.model_dump(), "parallel": parallel}, source)

    def located(self) -> "ExperimentConfig":
        """Return the config with absolute paths to its data, so that it reads them from any working directory."""
        data = self.data.model_copy(update={"root": _absolute(self.data.root)})
        file = self.split.file
        split = self.split.model_copy(update={"file": file and _absolute(file)})
        return self.model_copy(update={"data": data, "split": split})

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.output if self.output is not None else Path("runs") / self.name


def _absolute(path: Path) -> Path:
    # Not resolved: a link may be pointed to another disk later.
    return Path(os.path.abspath(path))
