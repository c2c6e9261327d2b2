"""Class probabilities from the network's grid back to the grid of the image's file.

As in nnU-Net, the probabilities are resampled and the label is decided afterwards, on the original voxels: a label map
resampled to the nearest voxel has the staircase of the coarser grid.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from monai.data import MetaTensor
from torch import Tensor

from volseg.errors import GridError
from volseg.inference.decision import SLAB_ELEMENTS, Decision, LabelRule
from volseg.inference.sampling import Aligned, Box, Held, Oblique, sample_grid
from volseg.transforms.grid import Grid

__all__ = ["NEAREST_AXIS", "WayBack", "label_map_on", "original_label_map", "resample"]

NEAREST_AXIS = "nearest_axis"
"""Key of a preprocessed image's ``meta``: its axis along which the nearest plane counts on the way back."""


@dataclass(frozen=True, slots=True, eq=False)
class WayBack:
    """From the voxels of a preprocessed image to those of its file.

    What the network finds in the padding is not taken for what a crop removed: the source is the image without it.
    """

    image: MetaTensor
    original: Grid
    source: Grid
    """Of the preprocessed image, without its padding."""
    start: tuple[int, int, int]
    """Voxel of the preprocessed image where the source begins."""
    sampling: Aligned | Oblique

    @classmethod
    def of(cls, image: MetaTensor) -> "WayBack":
        """Return the way back of a preprocessed image ``(C, D, H, W)``, whose ``meta`` remembers the grid it had."""
        padding = image.meta.get("padding", ((0, 0),) * 3)
        d, h, w = (int(before) for before, _ in padding)
        inner = [side - sum(margins) for side, margins in zip(image.shape[1:], padding, strict=True)]
        original, source = Grid.original(image), Grid.of(image).crop((d, h, w), inner)
        sampling = sample_grid(original, source, nearest_axis=image.meta.get(NEAREST_AXIS))
        return cls(image, original, source, (d, h, w), sampling)

    def begin(self, rule: LabelRule, *, also: Collection[str] = (), device: torch.device | str = "cpu") -> Decision:
        """Return an empty label map on the image's grid, to be filled slab by slab."""
        return Decision(self.sampling, self.original.shape, rule, also=also, device=device)

    def label(self, volume: Tensor) -> MetaTensor:
        """Return a volume ``(C, D, H, W)`` on the image's grid with grid, file name and header codes of the image."""
        labelled = MetaTensor(volume).copy_meta_from(self.image)
        labelled.affine = self.original.affine.clone()
        labelled.applied_operations = []
        labelled.meta.pop("padding", None)
        return labelled


def original_label_map(
    probabilities: Tensor, image: MetaTensor, *, values: Sequence[int] | None = None, regions: bool = False
) -> MetaTensor:
    """Return the label map ``(1, D, H, W)`` on the grid that ``image`` had in its file.

    Parameters
    ----------
    probabilities : Tensor
        ``(K, D, H, W)`` on the grid of the preprocessed image.
    image : MetaTensor
        The preprocessed image ``(C, D, H, W)``. Its ``meta`` (grid, file name, header codes) goes to the label map.
    values, regions
        As for `label_map_on`.
    """
    back = WayBack.of(image)
    box = tuple(slice(first, first + side) for first, side in zip(back.start, back.source.shape, strict=True))
    inner = probabilities[:, *box]
    _require_on(inner, back.source)
    decision = back.begin(LabelRule.of(len(inner), values, regions), device=inner.device)
    decision.take(Held(inner), _all_of(back.source))
    return back.label(decision.labels[None])


def label_map_on(
    target: Grid,
    probabilities: Tensor,
    source: Grid,
    *,
    values: Sequence[int] | None = None,
    regions: bool = False,
) -> Tensor:
    """Return the label map ``(1, D, H, W)`` on ``target`` of probabilities on ``source``.

    Parameters
    ----------
    target, source : Grid
        Where the label map and the probabilities lie.
    probabilities : Tensor
        ``(K, D, H, W)``, floating point; resampled trilinearly, edge voxels extended by half their side. A voxel of
        ``target`` that ``source`` does not cover (it was cropped away) is background, label 0.
    values : sequence of int, optional
        What the label map holds for each of the K; their indices by default. It is uint8 where these fit, else int32.
    regions : bool
        Whether the K are regions, which may overlap: each is painted where its probability exceeds one half, over those
        before it. Otherwise they are classes, of which the most probable counts, and the first is the background.

    Raises
    ------
    GridError
        For more than 256 classes, or probabilities that are not on ``source``.
    """
    rule = LabelRule.of(len(probabilities), values, regions)
    _require_on(probabilities, source)
    decision = Decision(sample_grid(target, source), target.shape, rule, device=probabilities.device)
    decision.take(Held(probabilities), _all_of(source))
    return decision.labels[None]


def resample(target: Grid, volume: Tensor, source: Grid, *, mode: str = "bilinear") -> Tensor:
    """Return ``volume`` ``(C, D, H, W)`` of ``source`` on ``target``; 0 where ``source`` does not reach.

    ``mode`` is ``"bilinear"`` (trilinear) or ``"nearest"``. The dtype is kept where no interpolation is needed and for
    ``"nearest"``.
    """
    _require_on(volume, source)
    sampling = sample_grid(target, source, mode=mode)
    dtype = torch.float32 if sampling.interpolates else volume.dtype
    resampled = torch.zeros(len(volume), *target.shape, dtype=dtype, device=volume.device)
    for place, values in sampling.read(Held(volume), _all_of(source), SLAB_ELEMENTS):
        resampled[:, *place] = values
    return resampled


def _all_of(grid: Grid) -> Box:
    depth, height, width = grid.shape
    return range(depth), range(height), range(width)


def _require_on(volume: Tensor, source: Grid) -> None:
    if tuple(volume.shape[1:]) != source.shape:
        raise GridError(f"a volume of shape {tuple(volume.shape)} does not lie on a grid of {source.shape} voxels")
