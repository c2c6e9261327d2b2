"""Normalise image intensities to a common scale; label maps stay unchanged."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform, NormalizeIntensity
from torch import Tensor

from volseg.errors import DataError
from volseg.fields import LABEL_FIELDS, Case
from volseg.transforms.slabs import run_over_slabs

SLAB_PLANES = 8


def _choose_channels(volume: Tensor, channels: Sequence[int] | None, field: str) -> list[int]:
    """Return the channels to normalise; None means all."""
    chosen = list(range(len(volume)) if channels is None else channels)
    if absent := [channel for channel in chosen if not 0 <= channel < len(volume)]:
        raise DataError(f"{field} has {len(volume)} channel(s), but no channel {absent[0]} (numbers start at 0)")
    return chosen


class ZScore(MapTransform):
    """Shift and scale each channel of each image to mean 0 and standard deviation 1.

    Parameters
    ----------
    nonzero : bool, optional
        Compute the moments over nonzero voxels and leave the others at 0, for skull-stripped images.
    channels : sequence of int, optional
        Channels to normalise; None: all.
    """

    def __init__(self, fields: Sequence[str], *, nonzero: bool = False, channels: Sequence[int] | None = None) -> None:
        super().__init__([field for field in fields if field not in LABEL_FIELDS])
        self.channels = channels
        self._normalise = NormalizeIntensity(nonzero=nonzero, channel_wise=True)

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case with normalised images and unchanged label maps."""
        case = dict(data)
        for field in self.key_iterator(case):
            voxels = case[field].as_tensor().to(torch.float32, copy=True)
            chosen = _choose_channels(voxels, self.channels, field)
            if len(chosen) == len(voxels):
                voxels = self._normalise(voxels)
            else:
                voxels[chosen] = self._normalise(voxels[chosen])
            case[field] = MetaTensor(voxels).copy_meta_from(case[field])
        return case


class ClipZScore(MapTransform):
    """Clip intensities, then subtract a mean and divide by a standard deviation, for CT.

    Parameters
    ----------
    lower, upper : float, optional
        Limits of the clipping in the image's unit (HU). nnU-Net: percentiles 0.5 and 99.5 of the data set's foreground.
    percentiles : (float, float), optional
        Percentiles of each channel's voxels to clip at, instead of ``lower`` and ``upper``.
    mean, std : float, optional
        Moments of the data set's foreground. None: each channel's own moments after clipping.
    channels : sequence of int, optional
        Channels to normalise; None: all.
    """

    def __init__(
        self,
        fields: Sequence[str],
        *,
        lower: float | None = None,
        upper: float | None = None,
        percentiles: Sequence[float] | None = None,
        mean: float | None = None,
        std: float | None = None,
        channels: Sequence[int] | None = None,
    ) -> None:
        super().__init__([field for field in fields if field not in LABEL_FIELDS])
        limits = lower is not None and upper is not None and lower < upper
        if limits == (percentiles is not None) or (percentiles and (lower, upper) != (None, None)):
            raise ValueError(f"needed: either lower < upper or percentiles, got {lower=}, {upper=}, {percentiles=}")
        if percentiles is not None and not (len(percentiles) == 2 and 0 <= percentiles[0] < percentiles[1] <= 100):
            raise ValueError(f"percentiles must be two increasing numbers in [0, 100], got {list(percentiles)}")
        if (mean is None) != (std is None) or (std is not None and std <= 0):
            raise ValueError(f"mean needs a positive std, and std needs mean, got {mean=}, {std=}")
        self.lower, self.upper, self.percentiles = lower, upper, percentiles
        self.mean, self.std, self.channels = mean, std, channels

    @property
    def is_voxelwise(self) -> bool:
        """Whether no voxel depends on another, so that a GPU computes the same bits."""
        return self.percentiles is None and self.mean is not None

    def __call__(self, data: Mapping[str, Any]) -> Case:
        """Return the case with normalised images and unchanged label maps."""
        case = dict(data)
        for field in self.key_iterator(case):
            chosen = _choose_channels(case[field], self.channels, field)
            voxels = case[field].as_tensor().to(torch.float32, copy=True)  # keeps the strides, and so the order of sums
            for number in chosen:
                self._normalise(voxels[number])
            case[field] = MetaTensor(voxels.contiguous()).copy_meta_from(case[field])
        return case

    def _normalise(self, channel: torch.Tensor) -> None:
        """Normalise a channel in place; a copy of a large CT takes longer than a step."""
        lower, upper = self.lower, self.upper
        if self.percentiles is not None:  # numpy: torch.quantile takes 2**24 voxels at most
            lower, upper = np.percentile(channel.numpy(force=True), self.percentiles).tolist()
        if self.mean is not None and self.std is not None:
            mean, deviation = self.mean, self.std
            if channel.device.type != "cpu":
                # A tensor, since a GPU divides by a number by multiplying with its reciprocal, which rounds
                # differently.
                divisor = torch.full((), deviation, device=channel.device)
                channel.clamp_(lower, upper).sub_(mean).div_(divisor)
                return
            run_over_slabs(
                lambda slab: channel[slab].clamp_(lower, upper).sub_(mean).div_(deviation), channel.shape, SLAB_PLANES
            )
            return
        channel.clamp_(lower, upper)
        std = channel.std(correction=0)
        channel.sub_(channel.mean()).div_(torch.where(std > 0, std, 1.0))
