"""nnU-Net's sliding window: its places, its Gaussian, and the mean of logits where `Predictor` means probabilities.

::

    image (C, D, H, W) -> windows -> networks, mirrored or not -> mean of logits -> blended
        -> original grid -> argmax, or logit > 0 of each region -> labels
                         -> softmax, or sigmoids: probabilities, if they are asked for

The order matters at every border between structures: the mean of logits and the mean of probabilities cross elsewhere.
Volumes are streamed as those of any `Predictor`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from volseg.inference.original_grid import IN_A_REGION
from volseg.inference.predictor import Predictor
from volseg.inference.window_step import WindowStep
from volseg.inference.windows import Windowing

__all__ = ["NnunetPredictor"]


class MeanLogits(WindowStep):
    """Average the logits of networks.

    Logits of regions are shifted by one half: a sigmoid above one half means a logit above 0. Interpolation preserves a
    shift; a sigmoid before it would move every border.
    """

    __slots__ = ()

    @property
    def link(self) -> str:
        """Empty: logits are blended."""
        return ""

    def __call__(self, windows: Tensor) -> Tensor:
        """Return the mean over all passes of the logits: ``(B, K, d, h, w)`` float32."""
        total: Tensor | None = None
        for logits, dims in self.passes(windows):
            one = logits.flip(dims) if dims else logits
            # A copy: a recorded network's next pass overwrites what it has returned.
            total = one.clone() if total is None else total.add_(one)
        assert total is not None
        return total.div_(self.num_passes)

    def passes(self, windows: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the logits of each pass in float32, those of regions moved, and the dims that were mirrored."""
        for logits, dims in WindowStep.passes(self, windows):
            yield logits.float() + IN_A_REGION if self.regions else logits.float(), dims


def place_windows(side: int, window: int, overlap: float) -> list[int]:
    """Return the first voxel of each window along an axis: as many as needed, evenly spread.

    Examples
    --------
    >>> place_windows(110, 64, 0.5)
    [0, 23, 46]
    """
    last = side - window
    count = int(np.ceil(last / (window * (1 - overlap)))) + 1
    return [int(np.round(last / max(count - 1, 1) * number)) for number in range(count)]


def compute_weight(window: Sequence[int], device: torch.device) -> Tensor:
    """Return the weight (d, h, w) of each voxel of a window, rounded to half precision as nnU-Net's is."""
    centre = np.zeros(tuple(window))
    centre[tuple(side // 2 for side in window)] = 1
    blurred = gaussian_filter(centre, [side / 8 for side in window], mode="constant")
    weight = torch.from_numpy(blurred / (blurred.max() / 10)).half()
    return torch.where(weight == 0, weight[weight > 0].min(), weight).float().to(device)


NNUNET = Windowing(place_windows, compute_weight)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NnunetPredictor(Predictor):
    """Apply networks that nnU-Net trained to whole volumes as nnU-Net does; a `Predictor` in all else."""

    step_kind = MeanLogits
    windowing = NNUNET
