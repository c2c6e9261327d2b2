"""Losses on label maps, and their form for sharded volumes."""

from volseg.losses import sharded  # noqa: F401  (registers the form of slabs)
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy
from volseg.losses.known_voxels import known_dice_cross_entropy
from volseg.losses.monai import DiceCELoss
from volseg.losses.targets import Targets

__all__ = ["DiceCELoss", "Targets", "Terms", "dice_cross_entropy", "known_dice_cross_entropy"]
