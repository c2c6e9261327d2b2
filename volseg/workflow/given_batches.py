"""The batches that a training is given: counted, checked, and brought to its device."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from volseg.data.cases import Batch
from volseg.errors import BatchFieldError, ConfigError

__all__ = ["count_batches", "count_voxels", "to_device"]


def count_batches(batches: Any) -> int:
    """Return how many batches an epoch has: the schedule, and where an epoch ends, follow from it.

    Raises
    ------
    ConfigError
        If they have no length, or there are none.
    """
    try:
        count = len(batches)
    except TypeError:
        raise ConfigError(
            f"batches need a length, the number of batches in an epoch, got a {type(batches).__name__}; pass a "
            "DataLoader, a list, or an object with __len__ and __iter__"
        ) from None
    if count < 1:
        raise ConfigError("batches are empty; an epoch needs one at least (a DataLoader may drop the last, short one)")
    return count


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch whose tensors are on a device, on their way there where they come from pinned memory.

    Raises
    ------
    BatchFieldError
        If it has no fields.
    """
    if not isinstance(batch, Mapping):
        raise BatchFieldError(
            'a batch is a dict of fields such as {"image": (B, C, D, H, W), "label": (B, 1, D, H, W)}, got a '
            f"{type(batch).__name__}; have the data set return a dict for each sample"
        )
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def count_voxels(image: Tensor | None, samples: int | None) -> int | None:
    """Return the voxels of a batch of so many samples, of which this process may have some only; None without images.

    Parameters
    ----------
    image : Tensor or None
        ``(B, C, ...)``.
    samples : int or None
        Of the whole batch; None where all of them are here.
    """
    if image is None or image.ndim < 3:
        return None
    return (samples or image.shape[0]) * math.prod(image.shape[2:])
