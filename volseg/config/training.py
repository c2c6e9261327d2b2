"""Config sections of the training loop, its patches and its kernels."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from volseg.config.base import ConfigModel, Count, Decay, Fraction, Positive, Sides


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
    """Fraction of a batch's patches that are drawn to contain foreground."""
    growth: tuple[GrowthConfig, ...] = ()
    """Smaller patches, with faster steps, at the start: ``[{until: 0.5, size: [24, 32, 24]}]``. The size changes
    between epochs, and the step is then recorded again. Excludes volumes or networks cut over GPUs."""

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
    """Precision of activations and gradients; ``auto`` takes bf16 on GPUs of compute capability 8.0 or higher, fp16 on
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
    prediction with any of them. ``auto`` takes the fast kernels where they pay: on a GPU that has them, if the step is
    recorded and computed in bfloat16 and all functions of the network have a fast kernel; else torch's, with the reason
    in the log. ``fast`` and ``compiled`` are refused if unavailable. ``measured`` times some steps with each at the
    start of a training, takes the fastest, and keeps it when the run is resumed."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of weights and activations on a GPU; auto measures which is faster for this network and patch, or takes
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
    are initialized anew, and a first convolution for other channels is adapted."""
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
