"""Random changes to whole batches, on the device that trains."""

from volseg.transforms.augmentation.batch import BatchAugmentation
from volseg.transforms.augmentation.parameters import AugmentationParameters

__all__ = ["AugmentationParameters", "BatchAugmentation"]
