"""Config sections of the data, of the components, and of the training loop."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from volseg.config.base import (
    ClassWeight,
    ComponentConfig,
    ConfigModel,
    Count,
    Decay,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    Seed,
    Sides,
)
from volseg.errors import ConfigError

PREVIOUS_STAGE = "PreviousStage"
"""Preprocessing component that adds a previous stage's label map to the image as channels."""


class DataConfig(ConfigModel):
    """Location and storage of the cases."""

    root: Path
    """Folder of a data set (MSD, nnU-Net, pairs of images and labels), its parent or its image folder; or a table
    of paths (CSV)."""
    skip_bad: bool = False
    """Leave out bad cases and list them in the report instead of raising an error before the training."""
    keep: Literal["auto", "device", "memory"] = "auto"
    """Where preprocessed cases are kept: ``auto`` keeps as many as fit, smallest first, on the GPU, and the rest in
    main memory. Batches are bit-identical either way."""
    device_limit: Positive | None = None
    """GiB of GPU memory that ``keep: auto`` may use for cases; null means 30 % of the free memory."""
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """How often patches of a training case are drawn, relative to the default of 1, by case names or patterns:
    ``{pseudo_*: 0.3, case_07: 0}``. The last match applies; 0 means never. Replaces the column ``weight`` of a
    table."""
    previous_stage: Path | None = None
    """Cross-validation folder of a coarser network, whose label maps become further channels of the images (nnU-Net's
    cascade) by ``{name: PreviousStage}`` in ``preprocessing``."""
    cache: str = "auto"
    """Folder that keeps preprocessed cases, memory-mapped, for the next fold, restart or resume. ``auto``:
    ``$VOLSEG_CACHE``, else ``~/.cache/volseg``; ``none``: each run preprocesses the cases into memory."""
    cache_limit: Positive = 200.0
    """Size limit of the folder in GiB, all tasks included; the least recently used cases are removed first."""


class SplitConfig(ConfigModel):
    """Split of the cases into training and validation."""

    validation: Literal["fold", "none"] = "fold"
    """``fold``: validate on the cases of one fold. ``none``: train on every case, validate on none."""
    fold: NonNegative = 0
    """Index of the validation fold, from 0; the other folds train."""
    num_folds: Annotated[int, Field(ge=2)] = 5
    """Number of folds."""
    seed: Seed = 12345
    """Seed of the folds; the default is nnU-Net's KFold(5, shuffle=True, random_state=12345) over sorted case ids."""
    file: Path | None = None
    """Split file in nnU-Net's format, ``[{"train": [...], "val": [...]}, ...]``; ``fold`` is an index into it. Without
    a file, the columns ``fold`` or ``split`` of a table apply."""
    group: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """How cases are grouped by patient; no patient both trains and validates. A regular expression with one group in
    parentheses, searched in case names, such as ``^(patient\\d+)``; a column name of the table; or ``PatientID`` of
    DICOM images. ``none``: one patient per case; null: the same, with a warning if the data set suggests otherwise.
    Given folds are checked, not changed."""

    @field_validator("group")
    @classmethod
    def _group_is_pattern_or_name(cls, group: str | None) -> str | None:
        if group is not None and "(" in group:
            compile_group(group)
        return group

    @model_validator(mode="after")
    def _fold_exists(self) -> "SplitConfig":
        if self.file is None and self.fold >= self.num_folds:
            raise ValueError(f"fold must be below num_folds={self.num_folds}, got {self.fold}")
        return self


def compile_group(group: str) -> re.Pattern[str]:
    """Return ``split.group`` as a compiled pattern.

    Raises
    ------
    ConfigError
        If ``group`` is not a regular expression, or does not have exactly one group in parentheses.
    """
    try:
        pattern = re.compile(group)
    except (re.error, OverflowError, RecursionError) as fault:
        raise ConfigError(f"{group!r} is not a regular expression: {fault}") from fault
    if pattern.groups != 1:
        raise ConfigError(
            f"the pattern {group!r} has {pattern.groups} groups in parentheses; needed: one, which matches the "
            "patient; (?:...) does not count"
        )
    return pattern


BATCH_FIELDS = frozenset({"image", "label"})
"""Fields of a batch besides the names of its cases."""


class NetworkConfig(ComponentConfig):
    """The network."""

    outputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits",)
    """Names of the returned tensors, in order, for losses to read; predictions use ``logits``."""

    @model_validator(mode="after")
    def _has_logits(self) -> Self:
        if "logits" not in self.outputs or len(set(self.outputs)) < len(self.outputs):
            raise ValueError(f"outputs must be different names, including logits, got {list(self.outputs)}")
        if taken := sorted(BATCH_FIELDS & {*self.outputs}):
            raise ValueError(f"outputs cannot be called {taken[0]}, the name of a field of the batch")
        return self


class OptimizerConfig(ComponentConfig):
    """The optimizer."""

    parts: dict[str, Annotated[dict[str, Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Other settings for parts of the network, such as ``{"output*": {lr: 1e-2}}``, by patterns of parameter names;
    ``*`` matches any characters."""


class LossConfig(ComponentConfig):
    """One term of the objective, which is the sum of all terms times their factors."""

    factor: Finite = 1.0
    """Factor of the term in the sum."""
    weight: tuple[ClassWeight, ...] | None = None
    """One weight per class, for losses that take class weights."""
    inputs: Annotated[tuple[str, ...], Field(min_length=1)] = ("logits", "label")
    """Arguments of the loss: fields of the batch and outputs of the network."""
    output: str = "loss"
    """Name of the term's value. Several terms need different names; ``loss`` is then their sum."""

    @field_validator("weight", mode="before")
    @classmethod
    def _is_no_factor(cls, value: Any) -> Any:
        """Refuse a single number, which probably means ``factor``."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"needed: a list of class weights; to scale the whole term, write factor: {value}")
        return value

    def spec(self) -> dict[str, Any]:
        """Return name and parameters for the registry of losses, class weights included."""
        return {**super().spec(), **({} if self.weight is None else {"weight": list(self.weight)})}


class MetricConfig(ComponentConfig):
    """A further metric of the validation besides Dice, for the foreground on the original grid, in mm."""

    inputs: tuple[str, ...] = ("pred", "label")
    """Arguments of the metric: the prediction ``pred`` and fields of the case."""
    output: str
    """Name of the value in TensorBoard and in the records."""


class ScheduleConfig(ComponentConfig):
    """Learning rate over the course of the training."""

    name: str = "polynomial"
    """``polynomial``, ``cosine``, ``constant``, or a custom schedule."""
    power: float | None = None
    """Exponent of ``polynomial``; null means 0.9."""
    floor: float | None = None
    """Final learning rate of ``cosine`` as a fraction of the peak; null means 0."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training over which the rate rises linearly to its peak."""

    def spec(self) -> dict[str, Any]:
        """Return name and parameters for the registry of schedules."""
        return self.model_dump(exclude_none=True, exclude={"warmup"})


class GrowthConfig(ConfigModel):
    """An early part of the training, on smaller patches."""

    until: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the epochs after which the next size, or ``patch.size``, applies."""
    size: Sides
    """Extent along D, H, W until then (voxels)."""


class PatchConfig(ConfigModel):
    """Training patches."""

    size: Sides
    """Extent along D, H, W (voxels after preprocessing)."""
    batch: Count = 2
    """Patches per batch."""
    foreground: Fraction = 0.33
    """Fraction of each batch drawn to contain foreground, rounded as in nnU-Net: 0.33 is 1 patch of 2, and 0 of 1."""
    growth: tuple[GrowthConfig, ...] = ()
    """Smaller patches, with faster steps, at the start: ``[{until: 0.5, size: [24, 32, 24]}]``. The size changes
    between epochs, and the step is then recorded again. Excludes volumes or networks cut over GPUs."""

    @model_validator(mode="after")
    def _grows(self) -> "PatchConfig":
        ends = [stage.until for stage in self.growth]
        shrinks = any(a > b for one, other in pairwise(self.sizes) for a, b in zip(one, other, strict=True))
        if shrinks or any(one >= other for one, other in pairwise(ends)):
            raise ValueError(
                "patch.growth must list parts of the training in order, with increasing until and no side larger than "
                f"in the next part or in patch.size {list(self.size)}; got "
                f"{[(stage.until, list(stage.size)) for stage in self.growth]}"
            )
        return self

    @property
    def sizes(self) -> tuple[Sides, ...]:
        """All patch sizes of a training, in order."""
        return (*(stage.size for stage in self.growth), self.size)

    def size_in(self, epoch: int, epochs: int) -> Sides:
        """Return the patch size of an epoch, counted from 0.

        >>> patch = PatchConfig(size=(8, 8, 8), growth=[{"until": 0.5, "size": (4, 4, 4)}])
        >>> [patch.size_in(epoch, 3)[0] for epoch in range(3)]
        [4, 4, 8]
        """
        # A product would be wrong: 0.55 * 100 rounds to more than 55, whereas 55 / 100 is exactly the written 0.55.
        return next((stage.size for stage in self.growth if epoch / epochs < stage.until), self.size)

    def first_whole(self, epochs: int) -> int:
        """Return the first epoch with patches of the final size; ``epochs`` if there is no such epoch."""
        return next((epoch for epoch in range(epochs) if self.size_in(epoch, epochs) == self.size), epochs)


class TrainingConfig(ConfigModel):
    """The training loop."""

    epochs: Count = 100
    """Number of epochs."""
    iterations: Count = 250
    """Batches per epoch."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of activations and gradients; ``auto`` uses bf16 on GPUs of compute capability 8.0 or higher, fp16 on
    older GPUs, and fp32 on a CPU. Weights are always float32."""
    clip: Positive | None = 12.0
    """Largest norm of the gradient; null does not clip."""
    accumulate: Count = 1
    """Batches per optimizer step."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the weights; validation and prediction then use the average."""
    validate_every: Count | None = 10
    """Epochs between validations; the last epoch is always validated. null: only the trained network is validated, at
    the end, and the best checkpoint is the last."""
    patience: Count | None = None
    """Validations without a better Dice before the training stops; null: never."""
    kernels: Literal["auto", "fast", "torch", "compiled", "measured"] = "auto"
    """Kernels of a network on one GPU. ``fast``: volseg's, which ``parallel.strategy: spatial`` also runs on every GPU.
    ``torch``: torch's and cuDNN's. ``compiled``: torch.compile's for the training pass and torch's for evaluation; the
    step is still recorded. All compute the same up to round-off, and a run can be resumed, validated and used for
    prediction with any of them. ``auto`` uses the fast kernels where they save time: on a GPU that has them, if the
    step is recorded and computed in bfloat16 and all functions of the network have a fast kernel; else torch's, with
    the reason in the log. ``fast`` and ``compiled`` are refused if unavailable. ``measured`` times some steps with each
    at the start of a training, chooses the fastest, and keeps it when the run is resumed."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of weights and activations on a GPU; auto measures which is faster for this network and patch, or uses
    contiguous in deterministic mode. The fast kernels always use channels last."""
    record: bool = True
    """Record the training step as a CUDA graph if possible."""
    deterministic: bool = False
    """Compute the same bits from the same seed on the same GPU; operators without a deterministic form are refused.
    Slower, except with the fast kernels, which always sum in a fixed order."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 5.0
    """Minutes between writes of the latest checkpoint, also within an epoch: the time that a crash can cost."""
    start_from: Path | None = None
    """Initial weights: any model for ``volseg predict`` (of several folds, name one), or only weights: a
    ``.safetensors`` file, a ``state_dict``, a MONAI bundle. Averaged weights take precedence. Heads for other labels
    get new random weights, and a first convolution for other channels is adapted."""
    start_strict: bool = True
    """Refuse initial weights if any are missing, unused or of another shape; false loads the weights that fit."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, as patterns of names, such as ``encoder.*``."""
    spot: Literal["none", "aws"] = "none"
    """Provider whose notices of a spot interruption end the run: ``aws`` queries the instance's metadata service every
    5 s; after a notice the run saves a checkpoint and exits with status 143."""

    @property
    def can_be_followed(self) -> bool:
        """Whether a step can run on fake tensors; a network compiled by torch.compile cannot."""
        return self.kernels != "compiled"


KERNELS_OF = {
    "none": ("auto", "fast", "torch", "compiled", "measured"),
    "spatial": ("auto", "fast"),
    "pipeline": ("auto", "torch"),
    "auto": ("auto",),
}
"""Choices of ``training.kernels`` by ``parallel.strategy``."""

UNSETTLED_KERNELS = ("compiled", "measured")
"""Choices of ``training.kernels`` that pick kernels by measured time, so that repeated runs may use different ones."""
