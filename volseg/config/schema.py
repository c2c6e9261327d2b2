"""The whole of an experiment, typed.

Every section is frozen and refuses unknown keys (`ConfigModel`); a component is a name and its own parameters. What
follows from the data (channels, classes) is not written here.
"""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from volseg.config.augmentation import AugmentationConfig
from volseg.config.base import ComponentConfig, ConfigModel, validated
from volseg.config.parallel import MeshPlan, ParallelConfig, choose_num_processes, plan_mesh

__all__ = [
    "BATCH_FIELDS",
    "AugmentationConfig",
    "ComponentConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "InferenceConfig",
    "LoggingConfig",
    "LossConfig",
    "MetricConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PatchConfig",
    "ScheduleConfig",
    "SplitConfig",
    "TrainingConfig",
]

Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegative = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Sides = tuple[Count, Count, Count]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What Python's, NumPy's and torch's generators all take."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
ClassWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]

BATCH_FIELDS = frozenset({"image", "label"})
"""What a batch holds besides the names of its cases."""


class NetworkConfig(ComponentConfig):
    """The network."""

    outputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits",)
    """Names of what it returns, in its order; losses read them, and ``logits`` is what is predicted with."""

    @model_validator(mode="after")
    def _has_logits(self) -> Self:
        if "logits" not in self.outputs or len(set(self.outputs)) < len(self.outputs):
            raise ValueError(f"outputs must be different names, logits among them, got {list(self.outputs)}")
        if taken := sorted(BATCH_FIELDS & {*self.outputs}):
            raise ValueError(f"outputs cannot be called {taken[0]}, as a field of the batch is")
        return self


class OptimizerConfig(ComponentConfig):
    """The optimizer."""

    parts: dict[str, Annotated[dict[str, Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Other settings for parts of the network, such as ``{"output*": {lr: 1e-2}}``: patterns of parameters' names, in
    which ``*`` stands for anything."""


def _also_a_number(schema: dict[str, Any]) -> None:
    """Describe what `LossConfig` still takes for its factor."""
    schema["anyOf"] = [
        *schema["anyOf"],
        {"type": "number", "deprecated": True, "description": "factor, by its old name"},
    ]


class LossConfig(ComponentConfig):
    """One term of the objective; several are added up with their factors."""

    factor: Finite = 1.0
    """Of the term in the sum."""
    weight: Annotated[tuple[ClassWeight, ...] | None, Field(json_schema_extra=_also_a_number)] = None
    """Class weights, one for each class, for losses that take them."""
    inputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits", "label")
    """What the loss is called with: fields of the batch and outputs of the network."""
    output: str = "loss"
    """Name of the term's scalar; among several terms each needs its own, and ``loss`` is their sum."""

    @model_validator(mode="before")
    @classmethod
    def _take_number_for_factor(cls, values: Any) -> Any:
        """Take a single number under ``weight`` for what it meant before class weights could be given."""
        number = values.get("weight") if isinstance(values, Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int | float):
            return values
        if "factor" in values:
            raise ValueError(
                f"weight is a list of class weights, and factor the term's share of the sum, got weight: {number} "
                "beside a factor; leave out one of them"
            )
        if number != 1 and math.isfinite(number):  # 1 changes nothing, and stands in every config that was written out
            warnings.warn(
                f"weight: {number} of a loss is factor: {number} now; one number as weight goes with the next release",
                FutureWarning,
                stacklevel=2,
            )
        return {**{key: value for key, value in values.items() if key != "weight"}, "factor": number}

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of losses takes them, class weights among them."""
        return {**super().spec(), **({} if self.weight is None else {"weight": list(self.weight)})}


class MetricConfig(ComponentConfig):
    """A further metric of the validation, beside Dice: of the foreground, on the original grid, in mm."""

    inputs: tuple[str, ...] = ("pred", "label")
    """What the metric is called with: the prediction and fields of the case."""
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
    """Where the preprocessed cases lie: ``auto`` puts on the GPU what fits (the smallest cases) and leaves the rest in
    main memory; batches are the same bits whatever lies where."""
    device_limit: Positive | None = None
    """GiB of the GPU that ``keep: auto`` may take for cases, in place of 30 % of what is free."""
    cache: str = "auto"
    """Folder in which preprocessed cases are kept for the next fold, restart or resume, and mapped from. ``auto``:
    ``$VOLSEG_CACHE``, else ``~/.cache/volseg``; ``none``: they are prepared anew and held in memory."""
    cache_limit: Positive = 200.0
    """GiB that the folder may take, of whatever task; what was used longest ago goes first."""


class SplitConfig(ConfigModel):
    """Which cases train and which validate."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: the cases of one fold. ``none``: train on every case, validate on none."""
    fold: NonNegative = 0
    """Which of the folds validates; the others train."""
    num_folds: Annotated[int, Field(ge=2)] = 5
    """Into how many folds the cases are dealt."""
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


class GrowthConfig(ConfigModel):
    """A first part of the training, on smaller patches."""

    until: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the epochs after which the next size is taken, or that of ``patch.size``."""
    size: Sides
    """Extent along D, H, W until then."""


class PatchConfig(ConfigModel):
    """Training patches."""

    size: Sides
    """Extent along D, H, W (voxels after preprocessing)."""
    batch: Count = 2
    """Patches per batch."""
    foreground: Fraction = 0.33
    """Fraction of a batch's patches that surely hold foreground."""
    growth: tuple[GrowthConfig, ...] = ()
    """Smaller patches to begin with, in whose steps less is computed: ``[{until: 0.5, size: [24, 32, 24]}]``. A size
    changes between two epochs, and its step is recorded anew. Not where volumes or networks are cut over GPUs."""

    @model_validator(mode="after")
    def _grows(self) -> "PatchConfig":
        ends = [stage.until for stage in self.growth]
        shrinks = any(a > b for one, other in pairwise(self.sizes) for a, b in zip(one, other, strict=True))
        if shrinks or any(one >= other for one, other in pairwise(ends)):
            raise ValueError(
                "patch.growth lists parts of the training in their order, each until later than the one before and no "
                f"side larger than in the next, up to patch.size {list(self.size)}; got "
                f"{[(stage.until, list(stage.size)) for stage in self.growth]}"
            )
        return self

    @property
    def sizes(self) -> tuple[Sides, ...]:
        """Every size of a training's patches, in their order."""
        return (*(stage.size for stage in self.growth), self.size)

    def size_in(self, epoch: int, epochs: int) -> Sides:
        """Return the size of an epoch's patches, the epochs being counted from 0.

        >>> patch = PatchConfig(size=(8, 8, 8), growth=[{"until": 0.5, "size": (4, 4, 4)}])
        >>> [patch.size_in(epoch, 3)[0] for epoch in range(3)]
        [4, 4, 8]
        """
        # Divided, as round-off makes 0.55 * 100 more than 55, and the quotient is the number that was written.
        return next((stage.size for stage in self.growth if epoch / epochs < stage.until), self.size)

    def first_whole(self, epochs: int) -> int:
        """Return the first epoch whose patches have the size that is trained up to; ``epochs`` if none has."""
        return next((epoch for epoch in range(epochs) if self.size_in(epoch, epochs) == self.size), epochs)


class ScheduleConfig(ComponentConfig):
    """Learning rate over the training."""

    name: str = "polynomial"
    """``polynomial``, ``cosine``, ``constant``, or one of your own."""
    power: float | None = None
    """Exponent of ``polynomial``; null takes 0.9."""
    floor: float | None = None
    """Of ``cosine``: the fraction of the peak that is left at the end; null takes 0."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training over which the rate rises linearly to its peak."""

    def spec(self) -> dict[str, Any]:
        """Return name and parameters as the registry of schedules takes them."""
        return self.model_dump(exclude_none=True, exclude={"warmup"})


class TrainingConfig(ConfigModel):
    """The loop."""

    renamed: ClassVar[Mapping[str, str]] = {"training.capture": "training.record"}

    epochs: Count = 100
    """Epochs of the training."""
    iterations: Count = 250
    """Batches per epoch."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of activations and gradients; ``auto`` takes bf16 on GPUs from compute capability 8.0 on, fp16 on older ones, and
    fp32 on a CPU. Weights are float32 in any case."""
    clip: Positive | None = 12.0
    """Largest norm of the gradient."""
    accumulate: Count = 1
    """Batches per optimizer step."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the weights, which is then what is validated and predicted with."""
    validate_every: Count | None = 10
    """Epochs between validations; the last epoch is always validated. null: no epoch is, only the trained network, at
    the end; then there is no best checkpoint but the last."""
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
    start_from: Path | None = None
    """Weights to begin with: a run folder (of its latest checkpoint, averaged where it has averages), a checkpoint, or
    a ``state_dict``. Heads for other labels are made anew and a first convolution of other channels is adapted."""
    start_strict: bool = True
    """Refuse weights of which others are missing, left over or of another shape. false begins with what fits."""
    frozen: tuple[str, ...] = ()
    """Parameters that stay as they are, by patterns of their names, such as ``encoder.*``."""
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
    windows: Count | None = None
    """Windows that go through the network together; null: as many as keep the GPU busy and fit its memory, one on a
    CPU."""
    record: bool = True
    """Record the pass of a batch of windows as a CUDA graph and replay it, after the training and in `volseg predict`;
    with it ``training.kernels: auto`` takes the fast ones there too."""
    skip_background: bool = False
    """Take windows in which the preprocessed image has one value, such as clipped air, for background unseen; not for
    structures that look like that."""


class EvaluationConfig(ConfigModel):
    """What a validation measures of each case and label beside Dice, IoU, counts and volumes."""

    distances: bool = True
    """HD95, HD and ASSD in mm, and NSD where there is a tolerance."""
    tolerance: Tolerance | dict[str, Tolerance] | None = None
    """Of NSD in mm, or that of each label by name; null takes what the task's manifest says, if it has one."""
    lesions: tuple[str, ...] = ()
    """Labels that are lesions, of which is asked how many were found."""
    lesion_overlap: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Intersection over union from which on a predicted lesion is a true one."""


class LoggingConfig(ConfigModel):
    """Where the numbers of a training go; ``history.jsonl``, ``status.json`` and ``times.json`` are always written."""

    loggers: tuple[ComponentConfig, ...] = (ComponentConfig(name="tensorboard"),)
    """``tensorboard``, ``wandb`` (pip install 'volseg[wandb]'), ``mlflow`` (pip install 'volseg[mlflow]') or loggers of
    your own; names alone, or with parameters: ``[tensorboard, {name: wandb, mode: offline}]``. ``[]`` for none."""
    channel: NonNegative | str = 0
    """Channel of the images that pictures show, in loggers and in the report: its number from 0 on, or its name in the
    data set, such as ``T2``."""

    @field_validator("loggers", mode="before")
    @classmethod
    def _take_names(cls, loggers: Any) -> Any:
        """Take a name alone for a logger without parameters."""
        if not isinstance(loggers, Sequence) or isinstance(loggers, str):
            return loggers
        return [{"name": logger} if isinstance(logger, str) else logger for logger in loggers]


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
    """Where to compute; ``auto`` takes GPUs where there are any."""
    data: DataConfig
    """Where the cases are and how they are kept."""
    split: SplitConfig = SplitConfig()
    """Which cases train and which validate."""
    preprocessing: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="Orientation"),
        ComponentConfig(name="ZScore"),
    )
    """What is done to every image before it is cut into patches, in this order."""
    patch: PatchConfig
    """Training patches."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Random changes to training batches, in the order in which they are applied."""
    network: NetworkConfig
    """The network, and its own parameters; channels and classes follow from the data."""
    losses: Annotated[tuple[LossConfig, ...], Field(min_length=1)] = (LossConfig(name="DiceCELoss"),)
    """Terms of the objective, which are added up."""
    metrics: tuple[MetricConfig, ...] = ()
    """Further metrics of the validation, beside Dice."""
    optimizer: OptimizerConfig
    """The optimizer, and its own parameters, such as ``lr``."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over the training."""
    training: TrainingConfig = TrainingConfig()
    """The loop."""
    hooks: tuple[ComponentConfig, ...] = ()
    """Of the user's own, called after the framework's."""
    inference: InferenceConfig = InferenceConfig()
    """How a whole volume is predicted."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """What a validation measures of each case and label."""
    logging: LoggingConfig = LoggingConfig()
    """Where a training's numbers and pictures go, besides its run folder."""
    parallel: ParallelConfig = ParallelConfig()
    """How one training uses several devices; ``auto`` chooses."""

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
    def _patience_has_validations(self) -> "ExperimentConfig":
        if self.training.patience is not None and self.training.validate_every is None:
            raise ValueError(
                "training.patience counts validations on the way, and training.validate_every: null makes none; leave "
                "out one of them"
            )
        return self

    @model_validator(mode="after")
    def _what_grows_is_whole(self) -> "ExperimentConfig":
        if self.patch.growth and self.parallel.may_cut:
            raise ValueError(
                "patch.growth changes the size of volumes, for which parallel has settled who computes what; train "
                "without patch.growth, or on whole volumes (parallel.data, and parallel.strategy: spatial with "
                "parallel.devices: 1 or parallel.spatial: 1 where activations are recomputed)"
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

    @model_validator(mode="after")
    def _same_bits_are_not_replanned(self) -> "ExperimentConfig":
        if self.training.deterministic and self.parallel.on_oom == "replan":
            raise ValueError(
                "parallel.on_oom: replan goes on with other kernels or another mesh, and training.deterministic: true "
                "promises the same bits from begin to end; leave out one of them"
            )
        return self

    def on_one_device(self, num_processes: int = 1) -> "ExperimentConfig":
        """Return the config for one device of each of ``num_processes``; nothing is cut where that is one process."""
        parallel = self.parallel.model_copy(update={"devices": 1})
        cuts_nothing = num_processes == 1 and parallel.only_chooses_kernels
        return self.model_copy(update={"parallel": ParallelConfig() if cuts_nothing else parallel})

    def count_processes(self, num_gpus: int | None, visible: int | None) -> int:
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
        """Return the config with absolute paths to what it reads, from any working directory."""
        cache = self.data.cache if self.data.cache in ("auto", "none") else str(_absolute(Path(self.data.cache)))
        data = self.data.model_copy(update={"root": _absolute(self.data.root), "cache": cache})
        file = self.split.file
        split = self.split.model_copy(update={"file": file and _absolute(file)})
        start = self.training.start_from
        training = self.training.model_copy(update={"start_from": start and _absolute(start)})
        return self.model_copy(update={"data": data, "split": split, "training": training})

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.output if self.output is not None else Path("runs") / self.name


def _absolute(path: Path) -> Path:
    # Not resolved: a link may be pointed to another disk later.
    return Path(os.path.abspath(path))
