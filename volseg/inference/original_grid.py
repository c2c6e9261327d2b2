"""Resample class probabilities from the network's grid to the grid of the image's file, and decide labels.

As in nnU-Net, the label is decided after resampling, on the original voxels. nnU-Net resamples logits, volseg
probabilities, except for networks of nnU-Net (`LabelRule.of_logits`). A label map resampled to the nearest voxel would
have the steps of the coarser grid.
"""

import copy
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.device.triton_tiles import takes
from volseg.errors import ConfigError, GridError
from volseg.inference import triton_prediction
from volseg.inference.sampling import Aligned, Box, Held, Place, locate_planes, sample_grid
from volseg.transforms.grid import Grid

# Decide labels on the image's grid from probabilities on the network's grid, box by box as they are computed.
# Probabilities are interpolated only where a label is decided. So the probabilities of all classes never exist on the
# image's grid; for a CT with many labels, they would exceed the memory of a GPU.


Also = Literal["entropy", "probabilities"]
"""Outputs that can be requested in addition to labels."""

MOST_LABELS = 256
"""Most classes of a uint8 label map of class indices."""

IN_A_REGION = 0.5
"""Probability above which a voxel is in a region; nnU-Net's number."""

SLAB_ELEMENTS = 2**25
"""Number of probabilities interpolated at once: 128 MiB in float32, and three times as much for intermediate
results."""


@dataclass(frozen=True, slots=True)
class LabelRule:
    """Rule to decide labels from the probabilities of K classes or regions."""

    values: tuple[int, ...]
    """Label value of each class or region."""
    regions: bool = False
    """Whether each region is painted where its probability exceeds one half, over the regions before it."""
    of_logits: bool = False
    """Whether logits are blended and interpolated, with the logits of regions shifted by `IN_A_REGION`. The labels are
    those of the probabilities that are computed from the logits on the image's grid."""

    @classmethod
    def of(
        cls, num_classes: int, values: Collection[int] | None, regions: bool, *, of_logits: bool = False
    ) -> "LabelRule":
        """Return the rule; values are the classes' indices by default."""
        if values is None and num_classes > MOST_LABELS:
            raise GridError(f"more than {MOST_LABELS} classes need values, got {num_classes} without them")
        return cls(tuple(range(num_classes) if values is None else values), regions, of_logits)

    def make_probabilities(self, blended: Tensor) -> Tensor:
        """Return the probabilities ``(K, ...)`` of blended and interpolated values."""
        if not self.of_logits:
            return blended
        return (blended - IN_A_REGION).sigmoid() if self.regions else blended.softmax(0)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type of a label map for the values."""
        return torch.uint8 if max(self.values) <= 255 else torch.int32

    @property
    def outside(self) -> int:
        """The label of a voxel that was cropped away: the first class, or 0 for regions."""
        return 0 if self.regions else self.values[0]

    def table(self, device: torch.device) -> Tensor | None:
        """Return the values as a tensor, or None if they are the class indices."""
        if self.values == tuple(range(len(self.values))) and not self.regions:
            return None
        return torch.tensor(self.values, dtype=self.dtype, device=device)


def decide(probabilities: Tensor, rule: LabelRule) -> Tensor:
    """Return the labels of probabilities ``(K, ...)``; of equally probable classes, the first is chosen."""
    if rule.regions:
        labels = torch.zeros(probabilities.shape[1:], dtype=rule.dtype, device=probabilities.device)
        for value, probability in zip(rule.values, probabilities, strict=True):
            labels.masked_fill_(probability > IN_A_REGION, value)
        return labels
    index, table = probabilities.argmax(0), rule.table(probabilities.device)
    return index.to(rule.dtype) if table is None else table[index]


def measure_entropy(probabilities: Tensor, regions: bool) -> Tensor:
    """Return the uncertainty of probabilities ``(K, ...)``, from 0 to 1; 1 if all classes are equally probable.

    It is the entropy divided by the logarithm of K; for regions, the mean of each region's entropy, with K = 2.
    """
    certain = torch.special.entr(probabilities)
    if regions:
        return (certain + torch.special.entr(1 - probabilities)).mean(0).div_(math.log(2)).clamp_(0, 1)
    total = certain.sum(0)
    return total.div_(math.log(len(probabilities))).clamp_(0, 1) if len(probabilities) > 1 else total.zero_()


class Decision:
    """The prediction of one image on the grid of its file, on the CPU, which is filled box by box.

    The source excludes the padding, so that the network's output there is not mistaken for cropped voxels.

    Parameters
    ----------
    image : MetaTensor
        A preprocessed image ``(C, D, H, W)``; its ``meta`` contains the original grid.
    rule : LabelRule
        Rule for the labels.
    also : collection of str
        ``entropy``, ``probabilities``; the latter need K times the image's voxels in float32.
    """

    def __init__(self, image: MetaTensor, rule: LabelRule, *, also: Collection[str] = ()) -> None:
        if unknown := set(also) - {"entropy", "probabilities"}:
            raise ConfigError(f"a prediction can also have entropy and probabilities, but not {sorted(unknown)}")
        padding = image.meta.get("padding", ((0, 0),) * 3)
        self.start = [int(before) for before, _ in padding]
        inner = [side - sum(margins) for side, margins in zip(image.shape[1:], padding, strict=True)]
        self.image, self.rule = image, rule
        self.original, self.source = Grid.original(image), Grid.of(image).crop(self.start, inner)
        self.sampling = sample_grid(self.original, self.source, nearest_axis=image.meta.get(NEAREST_AXIS))
        shape, classes = self.original.shape, len(rule.values)
        self.labels = torch.full(shape, rule.outside, dtype=rule.dtype)
        self.entropy = torch.zeros(shape) if "entropy" in also else None
        self.probabilities = torch.zeros(classes, *shape) if "probabilities" in also else None
        if self.probabilities is not None and not rule.regions:
            self.probabilities[0] = 1  # a cropped voxel is certainly background
        self._underway: deque[tuple[torch.cuda.Event, Tensor, Place, Tensor]] = deque()
        self._finite: Tensor | None = None

    def join(self) -> "Decision":
        """Return a decision that fills the same volumes, for a thread that decides other cells."""
        other = copy.copy(self)
        other._underway, other._finite = deque(), None
        return other

    def fill(self, held: Held, finished: Box, ready: Box, margin: Sequence[int]) -> None:
        """Check finished voxels of the padded volume, and decide the image's voxels that are ready.

        ``margin`` is the image's first voxel in the padded volume.
        """
        seen = _move(finished, margin, self.image.shape[-3:])
        pieces = [
            locate_planes(range(part.start + by - origin, part.stop + by - origin), side)
            for part, by, origin, side in zip(seen, margin, held.origin, held.values.shape[1:], strict=True)
        ]
        # A softmax is finite for either all classes or none.
        checked = held.values if self.rule.regions or self.rule.of_logits else held.values[:1]
        for piece in product(*pieces):
            finite = checked[:, *piece].isfinite().all()
            self._finite = finite if self._finite is None else self._finite & finite
        shift = [by + start for by, start in zip(margin, self.start, strict=True)]
        cells = _move(ready, shift, self.source.shape)
        if all(cells):
            d, h, w = (origin - by for origin, by in zip(held.origin, shift, strict=True))
            self.take(Held(held.values, (d, h, w)), cells)

    def take(self, held: Held, cells: Box) -> None:
        """Decide every voxel with a cell in a box; the planes after the box must also be in memory."""
        fused = isinstance(self.sampling, Aligned) and self.probabilities is None and takes(held.values)
        if fused and not (self.rule.of_logits and self.entropy is not None):
            assert isinstance(self.sampling, Aligned)
            found = triton_prediction.decide(
                self.sampling, held, cells, self.rule.table(held.values.device), self.rule.dtype,
                regions=self.rule.regions, entropy=self.entropy is not None,
            )  # fmt: skip
            for box, labels, entropy in found:
                self._bring(labels, self.labels, box)
                if self.entropy is not None and entropy is not None:
                    self._bring(entropy, self.entropy, box)
            return
        for place, blended in self.sampling.read(held, cells, SLAB_ELEMENTS):
            self._bring(decide(blended, self.rule), self.labels, place)
            if self.entropy is None and self.probabilities is None:
                continue
            probabilities = self.rule.make_probabilities(blended)
            if self.entropy is not None:
                self._bring(measure_entropy(probabilities, self.rule.regions), self.entropy, place)
            if self.probabilities is not None:
                for of_class, whole in zip(probabilities, self.probabilities, strict=True):
                    self._bring(of_class, whole, place)

    def finish(self) -> "Prediction | None":
        """Return the prediction, or None if a probability was not finite; only this call waits for the GPU."""
        while self._underway:
            self._land()
        if self._finite is not None and not bool(self._finite):
            return None
        return Prediction(
            labels=self._label(self.labels[None]),
            entropy=None if self.entropy is None else self._label(self.entropy[None]),
            probabilities=None if self.probabilities is None else self._label(self.probabilities),
        )

    def _label(self, volume: Tensor) -> MetaTensor:
        """Return a volume ``(C, D, H, W)`` with grid, file name and header codes of the image."""
        labelled = MetaTensor(volume).copy_meta_from(self.image)
        labelled.affine = self.original.affine.clone()
        labelled.applied_operations = []
        labelled.meta.pop("padding", None)
        return labelled

    def _bring(self, part: Tensor, whole: Tensor, place: Place) -> None:
        """Copy a part into the whole volume; copies from a GPU to the CPU run asynchronously."""
        if not part.is_cuda or isinstance(place[0], Tensor):
            whole[tuple(axis.cpu() if isinstance(axis, Tensor) else axis for axis in place)] = part.cpu()
            return
        staged = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        staged.copy_(part, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(part.device))
        self._underway.append((event, whole, place, staged))
        if len(self._underway) > 2:  # few staged copies, but the host rarely waits for the GPU
            self._land()

    def _land(self) -> None:
        event, whole, place, staged = self._underway.popleft()
        event.synchronize()
        whole[place] = staged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """The label map of a case, and other requested outputs."""

    labels: MetaTensor
    """``(1, D, H, W)``, the values of label files; with the grid, file name and header codes of the image."""
    entropy: MetaTensor | None = None
    """``(1, D, H, W)`` float32, the uncertainty of the model from 0 to 1: the entropy over the logarithm of K."""
    probabilities: MetaTensor | None = None
    """``(K, D, H, W)`` float32 on the CPU."""


NEAREST_AXIS = "nearest_axis"
"""Key in the ``meta`` of a preprocessed image: the axis along which resampling back uses the nearest plane."""


def resample(target: Grid, volume: Tensor, source: Grid) -> Tensor:
    """Return ``volume`` ``(C, D, H, W)`` of ``source`` on ``target``, trilinearly in float32; 0 outside ``source``."""
    require_on(volume, source)
    resampled = torch.zeros(len(volume), *target.shape, dtype=torch.float32, device=volume.device)
    depth, height, width = map(range, source.shape)
    for place, values in sample_grid(target, source).read(Held(volume), (depth, height, width), SLAB_ELEMENTS):
        resampled[:, *place] = values
    return resampled


def _move(box: Box, shift: Sequence[int], sides: Sequence[int]) -> Box:
    """Return a box relative to ``shift``, clipped to ``sides``."""
    d, h, w = (
        range(max(0, part.start - by), max(0, min(part.stop - by, side)))
        for part, by, side in zip(box, shift, sides, strict=True)
    )
    return d, h, w


def require_on(volume: Tensor, source: Grid) -> None:
    """Raise unless a volume ``(C, D, H, W)`` has the shape of a grid."""
    if tuple(volume.shape[1:]) != source.shape:
        raise GridError(f"a volume of shape {tuple(volume.shape)} is not on a grid of {source.shape} voxels")
