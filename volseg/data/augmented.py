"""Batches with augmentation on the training device, each a function of seed, epoch and position alone."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from volseg.transforms.augmentation import BatchAugmentation

__all__ = ["AugmentedBatches"]

Batch = dict[str, Any]


class EpochBatches(Protocol):
    """Batches that can be made for any epoch, from any position on."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Make the epoch's batches from batch ``start`` on."""


class AugmentedBatches:
    """Augment ``image`` and ``label`` of every batch.

    Every batch's random numbers are seeded by (seed, epoch, position), so that a training resumed in the middle of an
    epoch sees the batches it would have seen, without any state to save.

    Parameters
    ----------
    batches : EpochBatches
        ``{"image": (B, C, *source_size), "label": (B, 1, *source_size), ...}`` on the training device.
    augmentation : BatchAugmentation
        Gives patches of its own ``patch_size``.
    seed : int
        Of the experiment.
    device : torch.device
        Where the random numbers are drawn: the device of the batches.
    """

    def __init__(
        self, batches: EpochBatches, augmentation: BatchAugmentation, *, seed: int, device: torch.device | str
    ) -> None:
        self.batches = batches
        self.augmentation = augmentation
        self.seed = seed
        self.generator = torch.Generator(device)

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``number`` from batch ``start`` on."""
        for position, batch in enumerate(self.batches.epoch(number, start=start), start=start):
            # SeedSequence spreads neighbouring triples over unrelated seeds.
            mixed = np.random.SeedSequence([self.seed, number, position]).generate_state(1, np.uint64)
            self.generator.manual_seed(int(mixed[0]) >> 1)  # torch takes a signed 64-bit seed
            image, label = self.augmentation(batch["image"], batch["label"], self.generator)
            yield {**batch, "image": image, "label": label}
