"""The whole of an experiment, typed.

Every section is frozen and refuses unknown keys (`ConfigModel`); a component is a name and its own parameters. What
follows from the data (channels, classes) is not written here.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from volseg.config.augmentation import AugmentationConfig
from volseg.config.base import ConfigModel

__all__ = [
    "AugmentationConfig",
    "ComponentConfig",
    "DataConfig",
    "ExperimentConfig",
    "InferenceConfig",
    "LossConfig",
    "ParallelConfig",
    "PatchConfig",
    "ScheduleConfig",
    "SplitConfig",
    "TrainingConfig",
]

Sides = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


class ComponentConfig(BaseModel):
    """A component: its name in the registry of its kind, and parameters of its own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as a registry takes them."""
        return {"name": self.name, **(self.model_extra or {})}


class LossConfig(ComponentConfig):
    """One term of the objective; several are added up with their weights."""

    weight: float = 1.0
    inputs: tuple[str, ...] = ("logits", "label")
    output: str = "loss"
    """Name of the term's scalar; among several terms each needs its own, and ``loss`` is their sum."""


class DataConfig(ConfigModel):
    """Where the cases are and how they are kept."""

    root: Path
    """Folder of an MSD task (``TaskNN_Name``), or one level above or below it."""
    skip_bad: bool = False
    """Leave bad cases out and list them in the report, instead of stopping before the training."""
    keep: Literal["auto", "device", "memory"] = "auto"
    """Where the preprocessed cases lie: on the GPU when they fit, or in main memory."""


class SplitConfig(ConfigModel):
    """Which cases train and which validate."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: the cases of one fold. ``none``: train on every case, validate on none."""
    fold: int = Field(0, ge=0)
    num_folds: int = Field(5, ge=2)
    seed: int = 12345
    """nnU-Net's: KFold(5, shuffle=True, random_state=12345) over the sorted case ids."""
    file: Path | None = None
    """A split file of your own in nnU-Net's form, ``[{"train": [...], "val": [...]}, ...]``; ``fold`` chooses in it."""

    @model_validator(mode="after")
    def _fold_exists(self) -> "SplitConfig":
        if self.file is None and self.fold >= self.num_folds:
            raise ValueError(f"fold must be below num_folds={self.num_folds}, got {self.fold}")
        return self


class PatchConfig(ConfigModel):
    """Training patches."""

    size: Sides
    """Extent along D, H, W (voxels after preprocessing)."""
    batch: int = Field(2, ge=1)
    """Patches per batch."""
    foreground: float = Field(0.33, ge=0, le=1)
    """Fraction of a batch's patches that surely hold foreground."""


class ScheduleConfig(ConfigModel):
    """Learning rate over the training."""

    name: str = "polynomial"
    power: float | None = None
    floor: float | None = None
    warmup_steps: int = Field(0, ge=0)

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of schedules takes them."""
        return self.model_dump(exclude_none=True, exclude={"warmup_steps"})


class TrainingConfig(ConfigModel):
    """The loop."""

    epochs: int = Field(100, ge=1)
    iterations: int = Field(250, ge=1)
    """Batches per epoch."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    clip: float | None = Field(12.0, gt=0)
    """Largest norm of the gradient."""
    accumulate: int = Field(1, ge=1)
    """Batches per optimizer step."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is then what is validated and predicted with."""
    validate_every: int = Field(10, ge=1)
    """Epochs between validations; the last epoch is always validated."""
    patience: int | None = Field(None, ge=1)
    """Validations without a better Dice after which the training stops."""
    checkpoint_minutes: float = Field(5.0, ge=0)
    """Time between two writings of the latest checkpoint."""


class InferenceConfig(ConfigModel):
    """How a whole volume is predicted."""

    window: Sides | None = None
    """Sides of the sliding window in voxels; null predicts the whole volume at once."""
    overlap: float = Field(0.5, ge=0, lt=1)
    """Fraction of a window that its neighbour covers too."""
    mirror: bool = False
    """Average the predictions over the eight mirrorings."""


class ParallelConfig(ConfigModel):
    """How one model uses several devices."""

    strategy: Literal["none", "auto", "spatial", "pipeline"] = "none"
    devices: int | tuple[str, ...] | None = None
    """How many GPUs, or their names (``cpu`` may be named several times); null takes every visible one."""
    split_size: int | Literal["auto"] | None = None
    """Samples per micro-batch of a pipeline."""
    on_unsupported: Literal["raise", "gather"] = "raise"
    """What happens at an operator without a sharded form."""

    @model_validator(mode="after")
    def _split_size_belongs_to_a_pipeline(self) -> "ParallelConfig":
        if self.split_size is not None and self.strategy in ("none", "spatial"):
            raise ValueError(f"split_size belongs to strategy: pipeline (or auto), got strategy: {self.strategy}")
        return self


class ExperimentConfig(ConfigModel):
    """One training: from a folder of cases to a validated network."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Of the experiment; names the run folder."""
    output: Path | None = None
    """Run folder; null means ``runs/NAME``."""
    seed: int = 12345
    """Everything random follows from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataConfig
    split: SplitConfig = SplitConfig()
    preprocessing: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="Orientation"),
        ComponentConfig(name="ZScore"),
    )
    patch: PatchConfig
    augmentation: AugmentationConfig | None = AugmentationConfig()
    """null trains on plain patches."""
    network: ComponentConfig
    losses: tuple[LossConfig, ...] = Field((LossConfig(name="DiceCELoss"),), min_length=1)
    optimizer: ComponentConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()
    inference: InferenceConfig = InferenceConfig()
    parallel: ParallelConfig = ParallelConfig()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.output if self.output is not None else Path("runs") / self.name
