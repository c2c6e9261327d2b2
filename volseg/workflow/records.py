"""What a validation and an epoch leave behind: plain numbers, ready for a checkpoint, a plot or a table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

__all__ = ["CLOCKED", "EpochRecord", "Score"]

CLOCKED = ("seconds", "seconds_waited", "seconds_validating", "voxels_per_second")
"""Fields of an `EpochRecord` that depend on the wall clock; the others are equal in two runs of one config."""


class Score(Protocol):
    """What a validation returns."""

    @property
    def score(self) -> float:
        """The number by which epochs are compared; more is better."""

    @property
    def scores(self) -> Mapping[str, float]:
        """Further numbers by name."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """Numbers of one epoch."""

    epoch: int
    """Counted from 0: its place in ``training.history``. What is shown, logged or written for others counts from 1."""
    losses: Mapping[str, float]
    """Mean of every loss field over the epoch's batches; ``loss`` is the weighted sum that was minimised."""
    learning_rate: float
    """Of the first parameter group, at the end of the epoch."""
    seconds: float
    """Wall-clock time of the epoch's batches, without validation."""
    seconds_waited: float
    """Part of ``seconds`` in which the loop waited for its next batch."""
    score: float | None = None
    """What the validation returned (foreground mean Dice); None where the epoch was not validated."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the validation by name (Dice per label)."""
    peak_bytes: int | None = None
    """Most device memory allocated so far; None on CPU."""
    batches: int = 0
    """How many went by in ``seconds``; 0 in records of an older volseg."""
    seconds_validating: float = 0.0
    """Wall-clock time of the epoch's validation."""
    voxels_per_second: float | None = None
    """Voxels of all patches of all processes that were trained on, by ``seconds``; None where a batch has no image."""
    gradient_norm: float | None = None
    """Mean over the epoch's optimizer steps of the gradient's norm before it was clipped. Steps that float16 left out,
    for an infinite one, are not counted."""
    soft_dice: float | None = None
    """Soft Dice of the training's probabilities over the voxels of all batches, mean of the foreground classes. With
    `volseg.losses.DiceCELoss`, over the voxels that it counts. None without label maps or foreground."""

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain Python values."""
        return asdict(self)
