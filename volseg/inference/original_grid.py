"""Class probabilities from the network's grid back to the grid of the image's file.

As in nnU-Net, the probabilities are resampled and the label is decided afterwards, on the original voxels: a label map
resampled to the nearest voxel has the staircase of the coarser grid. Slab by slab, so that the probabilities of all
classes never exist on the original grid, which for a CT with many labels is more than a GPU holds.
"""

from collections.abc import Iterator, Sequence

import torch
from monai.data import MetaTensor
from torch import Tensor
from torch.nn.functional import grid_sample

from volseg.errors import GridError
from volseg.transforms.grid import Grid

__all__ = ["label_map_on", "original_label_map", "resample"]

MOST_LABELS = 256
"""A label map that holds class indices is uint8."""

IN_A_REGION = 0.5
"""Probability above which a voxel belongs to a region; nnU-Net's."""

WHOLE_VOXEL = 0.01
"""A map within this many voxels of a permutation, flip and whole shift is one: no interpolation, no change."""

SLAB_ELEMENTS = 2**26
"""Probabilities resampled at once: 256 MiB in float32."""


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
    padding = image.meta.get("padding", ((0, 0),) * 3)
    start = [before for before, _ in padding]
    inner = [side - sum(margins) for side, margins in zip(image.shape[1:], padding, strict=True)]
    box = tuple(slice(first, first + side) for first, side in zip(start, inner, strict=True))
    original = Grid.original(image)
    inside = Grid.of(image).crop(start, inner)
    labels = label_map_on(original, probabilities[:, *box], inside, values=values, regions=regions)

    label_map = MetaTensor(labels).copy_meta_from(image)
    label_map.affine = original.affine.clone()
    label_map.applied_operations = []
    label_map.meta.pop("padding", None)
    return label_map


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
    classes = len(probabilities)
    if values is None and classes > MOST_LABELS:
        raise GridError(f"a uint8 label map holds {MOST_LABELS} labels, the model has {classes} classes")
    held = list(range(classes) if values is None else values)
    dtype = torch.uint8 if max(held) <= 255 else torch.int32
    labels = torch.zeros(target.shape, dtype=dtype, device=probabilities.device)
    table = None if held == list(range(classes)) else torch.tensor(held, dtype=dtype, device=labels.device)
    for slab, resampled in _resample_slabs(target, probabilities, source, "bilinear"):
        if regions:
            for value, probability in zip(held, resampled, strict=True):
                labels[slab].masked_fill_(probability > IN_A_REGION, value)
        else:
            # 0 outside for every class: argmax returns the first of equals, which is the background.
            index = resampled.argmax(0)
            labels[slab] = index if table is None else table[index]
    return labels[None]


def resample(target: Grid, volume: Tensor, source: Grid, *, mode: str = "bilinear") -> Tensor:
    """Return ``volume`` ``(C, D, H, W)`` of ``source`` on ``target``; 0 where ``source`` does not reach.

    ``mode`` is ``"bilinear"`` (trilinear) or ``"nearest"``, as in `torch.nn.functional.grid_sample`. The dtype is
    kept where no interpolation is needed and for ``"nearest"``.
    """
    slabs = [values for _, values in _resample_slabs(target, volume, source, mode)]
    return torch.cat(slabs, dim=1)


def _resample_slabs(target: Grid, volume: Tensor, source: Grid, mode: str) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the first axis of ``target`` and the volume there."""
    if tuple(volume.shape[1:]) != source.shape:
        raise GridError(f"a volume of shape {tuple(volume.shape)} does not lie on a grid of {source.shape} voxels")
    to_source = target.index_map(source)
    moves_whole_voxels = _is_whole(to_source, target)
    depth, height, width = target.shape
    # Three float64 indices and three float32 coordinates per voxel weigh as much as nine more classes.
    thickness = max(1, SLAB_ELEMENTS // (height * width * (volume.shape[0] + 9)))
    for start in range(0, depth, thickness):
        slab = slice(start, min(start + thickness, depth))
        axes = [torch.arange(slab.start, slab.stop), torch.arange(height), torch.arange(width)]
        if moves_whole_voxels:
            yield slab, _rearrange(volume, to_source.round().long(), axes)
        else:
            yield slab, _interpolate(volume, to_source, axes, mode)


def _is_whole(to_source: Tensor, target: Grid) -> bool:
    """Tell whether a map only permutes and flips axes and shifts by whole voxels."""
    whole = to_source.round()
    permutes = all((whole[:3, :3].abs().sum(dim) == 1).all() for dim in (0, 1))
    return permutes and bool(((to_source - whole) @ target.corners()).abs().max() <= WHOLE_VOXEL)


def _rearrange(volume: Tensor, to_source: Tensor, axes: list[Tensor]) -> Tensor:
    """Return the volume permuted, flipped, cropped and padded with 0; exact.

    Along target axis t runs source axis a: ``index_a = sign * index_t + shift_a``.
    """
    sources = to_source[:3, :3].abs().argmax(0).tolist()
    volume = volume.permute(0, *(source + 1 for source in sources))
    for t, (source, indices) in enumerate(zip(sources, axes, strict=True)):
        dim, side = t + 1, volume.shape[t + 1]
        wanted = to_source[source, t] * indices + to_source[source, 3]
        outside = ((wanted < 0) | (wanted >= side)).nonzero().flatten()
        volume = volume.index_select(dim, wanted.clamp(0, side - 1).to(volume.device))
        volume = volume.index_fill(dim, outside.to(volume.device), 0)
    return volume


def _interpolate(volume: Tensor, to_source: Tensor, axes: list[Tensor], mode: str) -> Tensor:
    """Return the volume at the target indices ``axes``, sampled between voxels; 0 outside."""
    d, h, w = (axis.to(volume.device, torch.float64) for axis in axes)
    inside = torch.ones((), dtype=torch.bool, device=volume.device)
    coordinates = []
    for (by_d, by_h, by_w, shift), side in zip(to_source[:3].tolist(), volume.shape[1:], strict=True):
        # float64 up to here: in float32 the index itself is off by up to 3e-5 voxels at 512.
        index = by_d * d[:, None, None] + by_h * h[:, None] + by_w * w + shift
        # A voxel reaches half its side beyond its centre; the tolerance is for rounding in the affines.
        inside = inside & (index >= -0.5 - WHOLE_VOXEL) & (index <= side - 0.5 + WHOLE_VOXEL)
        coordinates.append(((2 * index + 1) / side - 1).float())
    points = torch.stack(coordinates[::-1], dim=-1)[None]  # grid_sample wants W first
    values = grid_sample(volume[None].float(), points, mode=mode, padding_mode="border", align_corners=False)[0]
    values = torch.where(inside, values, 0)
    return values.to(volume.dtype) if mode == "nearest" else values
