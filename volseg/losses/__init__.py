"""Losses on label maps, and their form for sharded volumes."""

from volseg.losses import sharded  # noqa: F401  (registers the form of slabs)
from volseg.losses.dice.reference import Terms
from volseg.losses.dice_cross_entropy import dice_cross_entropy
from volseg.losses.known_voxels import Targets, known_dice_cross_entropy
from volseg.losses.monai import DiceCELoss

__all__ = ["DiceCELoss", "Targets", "Terms", "dice_cross_entropy", "known_dice_cross_entropy"]
