"""Preprocess images as nnU-Net does, and predict by its sliding window: its positions, Gaussian and mean of logits.

::

    image as read -> transposed -> cropped -> normalised -> resampled
    image (C, D, H, W) -> windows -> networks, mirrored or not -> mean of logits -> blended
        -> original grid -> argmax, or logit > 0 of each region -> labels
                         -> softmax, or sigmoids: probabilities, if requested

The preprocessed volume has the affine of its new grid, so that label maps return to the original grid by geometry only.
The outer borders of the cropped and the resampled grid coincide, as in nnU-Net; so spacings differ slightly from the
plan's.

This predictor averages logits, whereas `Predictor` averages probabilities. The difference shifts the borders between
structures. Volumes are streamed as in `Predictor`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import MapTransform
from scipy.ndimage import binary_fill_holes, gaussian_filter
from torch import Tensor

from volseg.errors import DataError, GridError
from volseg.exchange.nnunet.plans import NnunetPlan, compute_thick_axis, resample
from volseg.fields import Case
from volseg.inference.original_grid import IN_A_REGION, NEAREST_AXIS
from volseg.inference.predictor import Predictor
from volseg.inference.window_step import WindowStep
from volseg.inference.windows import Windowing
from volseg.memory import available_bytes
from volseg.transforms.preprocessing import Preprocessing, RememberGrid, StoreVoxels, orientation
from volseg.transforms.resampling import ALWAYS_FITS, MOST_VOXELS

LEAST_DEVIATION = 1e-8


def build_preprocessing(plan: NnunetPlan) -> Preprocessing:
    """Return nnU-Net's preprocessing of images."""
    turn = [orientation(["image"], axcodes="RAS")] if plan.turns_to_ras else []
    preprocessing = Preprocessing([RememberGrid(["image"]), *turn, _AsNnunet(plan), StoreVoxels(["image"])])
    followed = {key: value for key, value in asdict(plan).items() if key not in ("name", "dataset", "network", "batch")}
    preprocessing.components = [{"name": "nnU-Net", **followed}]  # compared to detect other preprocessing
    return preprocessing


class _AsNnunet(MapTransform):
    """Preprocess an image like nnU-Net's ``DefaultPreprocessor``."""

    def __init__(self, plan: NnunetPlan) -> None:
        super().__init__(["image"])
        self.plan = plan

    def __call__(self, data: Mapping[str, Any]) -> Case:
        image: MetaTensor = data["image"]
        plan = self.plan
        if len(image) != len(plan.schemes):
            raise DataError(f"the image has {len(image)} channel(s), but the plans normalise {len(plan.schemes)}")
        # volseg's readers put the fastest axis first, nnU-Net's the slowest.
        axes = [2 - axis for axis in plan.transpose]
        voxels = image.as_tensor().float().permute(0, *(axis + 1 for axis in axes)).contiguous()
        affine = image.affine.to(torch.float64)[:, [*axes, 3]]
        inside = torch.from_numpy(binary_fill_holes((voxels != 0).any(0).numpy(force=True)))
        box = _find_box(inside)
        voxels, inside = voxels[(slice(None), *box)], inside[box]
        voxels = torch.stack([_normalise(channel, inside, plan, i) for i, channel in enumerate(voxels)])
        sides = affine[:3, :3].norm(dim=0).tolist()
        before = list(voxels.shape[1:])
        shape = [round(min(side / to * n, 2.0**31)) for side, to, n in zip(sides, plan.spacing, before, strict=True)]
        if math.prod(shape) > MOST_VOXELS or 16 * len(voxels) * math.prod(shape) > max(ALWAYS_FITS, available_bytes()):
            raise GridError(
                f"{before} voxels of {sides} mm become {shape} voxels of {list(plan.spacing)} mm, which do not fit in "
                "memory; check the spacing in the image's header and in the plans"
            )
        if 0 in shape:
            raise DataError(
                f"{before} voxels of {sides} mm cover less than one voxel of {list(plan.spacing)} mm along an axis; "
                "check the spacing in the image's header"
            )
        voxels = resample(voxels, shape, plan.of_images, compute_thick_axis(plan.of_images, sides, plan.spacing))
        made = MetaTensor(voxels).copy_meta_from(image)
        made.affine = affine @ _place([axis.start for axis in box], before, shape)
        thick = compute_thick_axis(plan.of_logits, plan.spacing, sides) if plan.of_logits.order_thick == 0 else None
        made.meta[NEAREST_AXIS] = thick
        return {**data, "image": made}


def _find_box(inside: Tensor) -> tuple[slice, slice, slice]:
    """Return the box around the voxels inside the mask; without such voxels the whole volume, as in nnU-Net."""
    spans = []
    for axis in range(3):
        found = inside.any(dim=[a for a in range(3) if a != axis]).nonzero().flatten().tolist()
        spans.append(slice(found[0], found[-1] + 1) if found else slice(0, inside.shape[axis]))
    d, h, w = spans
    return d, h, w


def _normalise(channel: Tensor, inside: Tensor, plan: NnunetPlan, number: int) -> Tensor:
    """Normalise a channel (D, H, W) by its scheme in the plans."""
    voxels = channel.numpy(force=True)  # numpy's sums give nnU-Net's bits
    match plan.schemes[number]:
        case "CTNormalization":
            given = plan.moments[str(number)]
            clipped = np.clip(voxels, given["percentile_00_5"], given["percentile_99_5"])
            scaled = (clipped - np.float32(given["mean"])) / np.float32(max(given["std"], LEAST_DEVIATION))
        case "ZScoreNormalization":
            chosen = inside.numpy() if plan.masked[number] else np.ones_like(voxels, dtype=bool)
            taken = voxels[chosen]
            scaled = voxels.copy()
            if taken.size:
                scaled[chosen] = (taken - taken.mean()) / max(taken.std(), LEAST_DEVIATION)
        case "RescaleTo01Normalization":
            scaled = voxels - voxels.min()
            scaled = scaled / max(scaled.max(), LEAST_DEVIATION)
        case "RGBTo01Normalization":
            if voxels.min() < 0 or voxels.max() > 255:
                raise DataError(f"channel {number} needs colours 0 to 255, got {voxels.min():g} to {voxels.max():g}")
            scaled = voxels / 255
        case _:
            scaled = voxels
    return torch.from_numpy(np.asarray(scaled, dtype=np.float32))


def _place(start: list[int], before: list[int], after: list[int]) -> Tensor:
    """Return the map from voxels of the resampled grid to voxels of the grid before the crop."""
    scale = torch.tensor([old / new for old, new in zip(before, after, strict=True)], dtype=torch.float64)
    matrix = torch.diag(torch.cat([scale, scale.new_ones(1)]))
    matrix[:3, 3] = (scale - 1) / 2 + torch.tensor(start)
    return matrix


class MeanLogits(WindowStep):
    """Average the logits of networks.

    Logits of regions are shifted by one half, as regions are thresholded at one half and a sigmoid exceeds it for
    logits above 0. Interpolation preserves the shift; a sigmoid before interpolation would move every border.
    """

    __slots__ = ()

    @property
    def link(self) -> str:
        """Name of the link function: empty, as logits are blended."""
        return ""

    def passes(self, windows: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the float32 logits of each pass, shifted for regions, and its mirrored dims."""
        for logits, dims in WindowStep.passes(self, windows):
            yield logits.float() + IN_A_REGION if self.regions else logits.float(), dims


def place_windows(side: int, window: int, overlap: float) -> list[int]:
    """Return the first voxel of each window along an axis: the fewest windows needed, evenly spaced.

    Examples
    --------
    >>> place_windows(110, 64, 0.5)
    [0, 23, 46]
    """
    last = side - window
    count = int(np.ceil(last / (window * (1 - overlap)))) + 1
    return [int(np.round(last / max(count - 1, 1) * number)) for number in range(count)]


def compute_weight(window: Sequence[int], device: torch.device) -> Tensor:
    """Return the weight (d, h, w) of each voxel of a window, rounded to half precision as in nnU-Net."""
    centre = np.zeros(tuple(window))
    centre[tuple(side // 2 for side in window)] = 1
    blurred = gaussian_filter(centre, [side / 8 for side in window], mode="constant")
    weight = torch.from_numpy(blurred / (blurred.max() / 10)).half()
    return torch.where(weight == 0, weight[weight > 0].min(), weight).float().to(device)


NNUNET = Windowing(place_windows, compute_weight)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NnunetPredictor(Predictor):
    """A `Predictor` that applies networks of nnU-Net to whole volumes as nnU-Net does."""

    step_kind = MeanLogits
    windowing = NNUNET
