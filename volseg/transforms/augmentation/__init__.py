"""Augment whole batches at random, on the training device."""

from volseg.transforms.augmentation.batch import BatchAugmentation
from volseg.transforms.augmentation.parameters import AugmentationParameters

__all__ = ["AugmentationParameters", "BatchAugmentation"]
