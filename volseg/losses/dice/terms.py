"""What the loss adds up, and the sums over the voxels that it is made of.

The sums of a sample and class ``c`` over the voxels, with ``p`` the softmax of the logits and ``y`` the label:

=========  ========================  ==========================================
row        sum of                    for
=========  ========================  ==========================================
overlap    ``p[c] [y = c]``          Dice's numerator
mass       ``p[c]`` or its square    Dice's denominator
truth      ``[y = c]``               Dice's denominator; NaN if a label is no class
surprise   ``-log p[c] [y = c]``     cross entropy
=========  ========================  ==========================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["MASS", "OVERLAP", "SURPRISE", "TRUTH", "Terms"]

OVERLAP, MASS, TRUTH, SURPRISE = range(4)
"""Rows of the sums."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss ``dice * mean(1 - Dice) + cross_entropy * mean(-log p[y])``; the names are MONAI's ``DiceCELoss``'s.

    Attributes
    ----------
    dice, cross_entropy
        Weights of the two losses.
    include_background
        Whether class 0 takes part in the mean of Dice.
    batch
        Whether Dice is of the voxels of all samples, and not a mean over samples.
    squared
        Whether probabilities are squared in the denominator.
    jaccard
        Whether intersection over union replaces Dice.
    smooth_nr, smooth_dr
        Added to numerator and denominator.
    """

    dice: float = 1.0
    cross_entropy: float = 1.0
    include_background: bool = True
    batch: bool = False
    squared: bool = False
    jaccard: bool = False
    smooth_nr: float = 1e-5
    smooth_dr: float = 1e-5

    @property
    def denominator(self) -> tuple[float, float]:
        """Factors of ``mass + truth`` and of ``-overlap`` in the denominator, where the numerator is 2 * overlap."""
        return (2.0, 2.0) if self.jaccard else (1.0, 0.0)

    def factors(self, shape: Sequence[int]) -> tuple[float, float]:
        """Return what a pair's Dice loss and what a pair's surprise are multiplied by, in logits of ``shape``."""
        samples, classes, *sides = shape
        pairs = (1 if self.batch else samples) * (classes - (not self.include_background))
        return self.dice / pairs, self.cross_entropy / (samples * prod(sides))
