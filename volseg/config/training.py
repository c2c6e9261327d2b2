"""The loop of a training, its patches, and the kernels that it runs."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from volseg.config.base import ConfigModel, Count, Decay, Fraction, Positive, Sides

__all__ = ["KERNELS_OF", "UNSETTLED_KERNELS", "GrowthConfig", "PatchConfig", "TrainingConfig"]


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


class TrainingConfig(ConfigModel):
    """The loop."""

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
    kernels: Literal["auto", "fast", "torch", "compiled", "measured"] = "auto"
    """Kernels of a network on one GPU: ``fast`` are this package's, which ``parallel.strategy: spatial`` runs on every
    GPU too; ``torch`` are torch's and cuDNN's; ``compiled`` are what torch.compile makes of the network's training pass
    (evaluation runs torch's), and its step is recorded all the same. All compute the same up to round-off, and runs of
    any are resumed, validated and predicted with by the others. ``auto`` takes the fast ones where they pay: on a GPU
    that has them, in a training whose step is recorded and computed in bfloat16, for a network whose functions all have
    a form among them; elsewhere torch's, and says why. ``fast`` and ``compiled`` are refused where they cannot be had.
    ``measured`` times some steps of each at the start of a training, takes the fastest, and keeps to it when the run is
    resumed."""
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
    """Initial weights: whatever ``volseg predict`` takes (of several networks, one fold), or weights only: a
    ``.safetensors`` file, a ``state_dict``, a MONAI bundle. Averaged weights are taken if there are any. Heads for
    other labels are made anew and a first convolution of other channels is adapted."""
    start_strict: bool = True
    """Refuse weights of which others are missing, left over or of another shape. false begins with what fits."""
    frozen: tuple[str, ...] = ()
    """Parameters that stay as they are, by patterns of their names, such as ``encoder.*``."""
    spot: Literal["none", "aws"] = "none"
    """Whose notices that the machine will be taken away are heeded: ``aws`` asks the instance's metadata service every
    5 s, and saves and ends with status 143 when it says so."""

    @property
    def can_be_followed(self) -> bool:
        """Whether a step can be run on tensors without values: what torch.compile makes of a network cannot."""
        return self.kernels != "compiled"


KERNELS_OF = {
    "none": ("auto", "fast", "torch", "compiled", "measured"),
    "spatial": ("auto", "fast"),
    "pipeline": ("auto", "torch"),
    "auto": ("auto",),
}
"""Which ``training.kernels`` each ``parallel.strategy`` can run; only without one is there a choice."""

UNSETTLED_KERNELS = ("compiled", "measured")
"""Kinds of ``training.kernels`` whose kernels are chosen by how long they take, and may be others the next time."""
