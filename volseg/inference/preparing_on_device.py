"""Preprocess what was read on the GPU that predicts it: a CT is resampled there in the time that its way there takes.

The thread that computes does it, for no other may work on a GPU while that one records. What is computed from many
voxels at once (means, quantiles) and what takes the nearest voxel stays on the CPU, where the training computed it: on
a GPU it could be another number. A resampled voxel may differ in the last bit of float32.
"""

import logging
from typing import Any

import torch
from monai.data import MetaTensor

from volseg.data.preprocessed import Preprocessing, preprocess
from volseg.fields import Case
from volseg.inference.streaming import count_free_bytes
from volseg.transforms.preprocessing import Preprocessing as Composed

__all__ = ["prepare_on", "suits"]

logger = logging.getLogger(__name__)

BYTES_ON_THE_WAY = 24
"""Of each voxel that was read: itself in float32 and float64, and what is made of it, twice."""

LARGEST_PART = 4
"""An image may take a quarter of what is free on the way, since it is small beside what its windows take."""

KEPT_PART = 8
"""Prepared it stays there if it takes an eighth at most, as windows are cut there then."""


def suits(preprocessing: Preprocessing, device: torch.device) -> bool:
    """Say whether a device prepares images as the CPU does, and faster."""
    return device.type != "cpu" and isinstance(preprocessing, Composed) and preprocessing.suits_devices


def prepare_on(device: torch.device, read: dict[str, Any], preprocessing: Preprocessing) -> Case:
    """Return the preprocessed case; its image lies on the device where there is room, else on the CPU.

    Parameters
    ----------
    device : torch.device
        One that `suits`.
    read : dict
        The case as it was read; it is empty afterwards.
    preprocessing : callable
        See `volseg.transforms.build_preprocessing`.
    """
    image = read["image"]
    if image.numel() * BYTES_ON_THE_WAY > count_free_bytes(device) // LARGEST_PART:
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    try:
        prepared = preprocess({**read, "image": image.to(device)}, read, preprocessing, keep_reference=False)
    except torch.OutOfMemoryError as fault:
        logger.info("an image is prepared on the CPU: %s", str(fault).partition("\n")[0])
        prepared = None
    if prepared is None:  # outside of the block above, whose fault keeps alive what did not fit
        del image
        return preprocess(read, read, preprocessing, keep_reference=False)
    read.clear()
    made: MetaTensor = prepared["image"]
    if made.numel() * made.element_size() > count_free_bytes(device) // KEPT_PART:
        prepared["image"] = made.cpu()
    return prepared
