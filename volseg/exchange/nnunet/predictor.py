"""nnU-Net's sliding window: its places, its Gaussian, and the mean of logits where `Predictor` means probabilities.

::

    image (C, D, H, W) -> windows -> network, mirrored or not -> mean of logits -> blended -> mean over folds
        -> original grid -> argmax, or logit > 0 of each region -> labels

The order matters at every border between structures: the mean of logits and the mean of probabilities cross elsewhere.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import pad

from volseg.errors import ConfigError, NonFinitePredictionError
from volseg.exchange.nnunet.preprocessing import NEAREST_AXIS
from volseg.exchange.nnunet.resampling import nearest_planes
from volseg.inference.decision import IN_A_REGION, Also
from volseg.inference.original_grid import original_label_map
from volseg.inference.prediction import Prediction
from volseg.inference.predictor import Predictor, evaluating

__all__ = ["NnunetPredictor", "place_windows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NnunetPredictor(Predictor):
    """Apply networks that nnU-Net trained to whole volumes as nnU-Net does; a `Predictor` in all else."""

    def stream(
        self,
        cases: Iterable[Mapping[str, Any]],
        *,
        batch_size: int = 1,
        field: str = "image",
        also: Collection[Also] = (),
    ) -> Iterator[tuple[Mapping[str, Any], Prediction]]:
        """Yield each case with its prediction, one volume after the other whatever ``batch_size`` is.

        Raises
        ------
        ConfigError
            If more than label maps is asked for.
        NonFinitePredictionError
            If a logit is not finite.
        """
        del batch_size
        if also:
            raise ConfigError(f"networks of nnU-Net give label maps alone, got also {', '.join(also)}; leave these out")
        for case in cases:
            image = case[field]
            logits = self.logits(image.as_tensor())
            if not logits.isfinite().all():
                raise NonFinitePredictionError(
                    f"case {case.get('case', '(unnamed)')}: the networks gave logits that are not finite; check the "
                    "image, or predict by --set training.precision=fp32"
                )
            yield case, Prediction(labels=self._label(logits, image))

    @torch.no_grad()
    def logits(self, image: Tensor) -> Tensor:
        """Return logits ``(K, D, H, W)`` float32 of a preprocessed image ``(C, D, H, W)``."""
        device, window = self._choose_device(image), self.window
        if window is None:
            raise ConfigError(
                "nnU-Net predicts by windows: inference.window should be the patch of its plans, got null"
            )
        missing = [max(0, side - have) for side, have in zip(window, image.shape[1:], strict=True)]
        margins = [part for short in reversed(missing) for part in (short // 2, short - short // 2)]
        padded = pad(image.to(device), margins)
        weight = compute_weight(window).to(device)
        total = torch.zeros(self.num_classes, *padded.shape[1:], device=device)
        weights = torch.zeros(padded.shape[1:], device=device)
        starts = [place_windows(n, side, self.overlap) for n, side in zip(padded.shape[1:], window, strict=True)]
        with evaluating(self.models):
            for corner in product(*starts):
                box = tuple(slice(first, first + side) for first, side in zip(corner, window, strict=True))
                total[(slice(None), *box)] += self._average(padded[(slice(None), *box)][None])[0] * weight
                weights[box] += weight
        total /= weights
        inside = [slice(short // 2, short // 2 + n) for short, n in zip(missing, image.shape[1:], strict=True)]
        return total[(slice(None), *inside)]

    def _average(self, window: Tensor) -> Tensor:
        """Return the mean of the logits (1, K, d, h, w) over networks and mirrorings."""
        total: Tensor | None = None
        for logits, dims in self.window_step.passes(window):
            one = logits.float().flip(dims) if dims else logits.float()
            total = one if total is None else total.add_(one)
        assert total is not None
        return total.div_(self.window_step.num_passes)

    def _label(self, logits: Tensor, image: MetaTensor) -> MetaTensor:
        placed = image
        if thick := image.meta.get(NEAREST_AXIS):
            axis, planes = thick
            logits, placed = _take_planes(logits, image, axis, planes)
        if self.regions:
            # A sigmoid exceeds one half, which is looked for, where its logit exceeds 0. A shift passes a linear
            # interpolation as it is; a sigmoid before it would move every border.
            logits = logits + IN_A_REGION
        return original_label_map(logits, placed, values=self.values, regions=self.regions)


def _take_planes(logits: Tensor, image: MetaTensor, axis: int, planes: int) -> tuple[Tensor, MetaTensor]:
    """Return the logits with as many planes as the file has along an axis, and a volume on their grid."""
    before = logits.shape[axis + 1]
    taken = logits.index_select(axis + 1, nearest_planes(before, planes, logits.device))
    scale = torch.eye(4, dtype=torch.float64)
    scale[axis, axis] = before / planes
    scale[axis, 3] = (before / planes - 1) / 2
    placed = MetaTensor(taken[:1]).copy_meta_from(image)
    placed.affine = image.affine.to(torch.float64) @ scale
    return taken, placed


def place_windows(size: int, window: int, overlap: float) -> list[int]:
    """Return the first voxel of each window along an axis: as many as needed, evenly spread.

    Examples
    --------
    >>> place_windows(110, 64, 0.5)
    [0, 23, 46]
    """
    last = size - window
    count = int(np.ceil(last / (window * (1 - overlap)))) + 1
    return [int(np.round(last / max(count - 1, 1) * number)) for number in range(count)]


def compute_weight(window: Sequence[int]) -> Tensor:
    """Return the weight (d, h, w) of each voxel of a window, rounded to half precision as nnU-Net's is."""
    centre = np.zeros(tuple(window))
    centre[tuple(side // 2 for side in window)] = 1
    blurred = gaussian_filter(centre, [side / 8 for side in window], mode="constant")
    weight = torch.from_numpy(blurred / (blurred.max() / 10)).half()
    return torch.where(weight == 0, weight[weight > 0].min(), weight).float()
