"""Slices of a case as a picture: the image, with lines around what was labelled and what was predicted.

A line hides little of the image, which a coloured area does. A label has a coloured line and a faint tint within it, a
prediction a pale line of the same hue: where both agree the lines lie on each other, what was missed has a tint without
a pale line, what was made up a pale line without a tint.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from nibabel.orientations import io_orientation
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from volseg.data.labels import LABEL_COLOURS
from volseg.workflow.validation import Example

__all__ = ["PALETTE", "draw_example", "draw_patches", "draw_slices", "face_patient"]

PALETTE = torch.tensor(LABEL_COLOURS, dtype=torch.float32)

PLANES = ("sagittal", "coronal", "axial")
"""What is seen along each axis of a volume that faces the patient."""

SIDES = (("A", "P"), ("R", "L"), ("R", "L"))
"""Of the patient, left and right in the picture of each plane: as if seen from the feet, as radiologists do."""

TINT = 0.18
PALE = 0.6
"""How white a prediction's line is."""

DARK = 0.05
"""Of the range of intensities: planes at the border that are darker, and hold no label, are cut off."""

TEXT = (205, 205, 205)
GAP = 6
SAMPLES = 4
"""Of a batch, that are drawn."""

LONGEST = 4
"""Times ``min_side``: what is very long and thin is not drawn any larger."""


def draw_example(example: Example, *, channel: int = 0, min_side: int = 512) -> Tensor:
    """Return the slices of a validated case, turned to face the patient; see `draw_slices`."""
    affine = example.affine
    image, label, prediction = (
        face_patient(volume, affine) for volume in (example.image, example.label, example.prediction)
    )
    spacing = [float(affine[:3, source].norm()) for source in _find_axes(affine)[0]]
    return draw_slices(image, label, prediction, spacing=spacing, channel=channel, min_side=min_side)


def draw_patches(images: Tensor, labels: Tensor, *, channel: int = 0) -> Tensor:
    """Return the slices of a batch's first samples below each other; see `draw_slices`.

    Parameters
    ----------
    images, labels : Tensor
        ``(B, C, D, H, W)`` and ``(B, D, H, W)`` or ``(B, 1, D, H, W)``, on any device.
    channel : int
        Of the images.
    """
    chosen = images[:SAMPLES].detach().cpu(), labels[:SAMPLES].flatten(1).unflatten(1, (-1, *labels.shape[-3:])).cpu()
    samples = zip(*chosen, strict=True)
    return _put_together(
        [draw_slices(image, label[0], spacing=(1, 1, 1), channel=channel, min_side=256) for image, label in samples], -2
    )


def face_patient(volume: Tensor, affine: Tensor) -> Tensor:
    """Return a volume ``(..., D, H, W)`` with its axes to the patient's right, front and head, as nearly as they lie.

    Parameters
    ----------
    volume : Tensor
        Voxels as a file has them.
    affine : Tensor
        4 x 4, voxel index to RAS+ position in mm.
    """
    order, is_flipped = _find_axes(affine)
    leading = volume.ndim - 3
    turned = volume.permute(*range(leading), *(leading + source for source in order))
    return turned.flip([leading + axis for axis in range(3) if is_flipped[axis]])


def draw_slices(
    image: Tensor,
    label: Tensor,
    prediction: Tensor | None = None,
    *,
    spacing: Sequence[float],
    channel: int = 0,
    min_side: int = 512,
) -> Tensor:
    """Return a picture ``(3, height, width)`` of uint8: the slice along each axis that holds most label voxels.

    Parameters
    ----------
    image : Tensor
        ``(D, H, W)`` or ``(C, D, H, W)`` of any intensities, also of such that are no numbers; to be seen as a patient,
        its axes point right, to the front and to the head (`face_patient`).
    label : Tensor
        ``(D, H, W)``, integers; 0 is not drawn.
    prediction : Tensor, optional
        As ``label``. Where there is no label, the slices are those that hold most of the prediction.
    spacing : sequence of float
        Sides of a voxel along D, H and W in mm: voxels are drawn in their true proportion.
    channel : int
        Of the image, which is drawn.
    min_side : int
        Pixels that the picture has at least in height and in width.
    """
    image, label = image.as_subclass(Tensor), label.as_subclass(Tensor)  # a MetaTensor carries its affine along
    prediction = None if prediction is None else prediction.as_subclass(Tensor)
    volume = image if image.ndim == 3 else image[channel]
    grey = _scale_intensities(volume)
    shown = label if prediction is None or bool((label > 0).any()) else prediction
    volumes = [each for each in (grey, label, prediction) if each is not None]
    box = _find_content(volumes)
    extents = [(part.stop - part.start) * side for part, side in zip(box, spacing, strict=True)]
    is_stacked, pixels = _choose_layout(extents, spacing, min_side)
    panels = []
    for axis in range(3):
        index = _find_fullest(shown, axis)
        across, upward = (dim for dim in range(3) if dim != axis)
        size = (max(round(extents[upward] * pixels), 1), max(round(extents[across] * pixels), 1))
        planes = (each.select(axis, index)[box[across], box[upward]] for each in volumes)
        cut = [plane.mT.flip(-2, -1) for plane in planes]  # upward; right and front of the patient to the left
        panel = _paint(cut, size, line=max(round(min_side / 256), 1))
        title = f"{PLANES[axis]} {index + 1} / {volume.shape[axis]}"
        panels.append(_frame(panel, title, SIDES[axis], min_side // 4))
    row = _put_together([_put_together(panels[:2], -2), panels[2]] if is_stacked else panels, -1)
    height, width = (max(min_side, size) for size in row.shape[-2:])
    return functional.pad(row, (*_centre(row.shape[-1], width), 0, height - row.shape[-2]))


def _find_axes(affine: Tensor) -> tuple[list[int], list[bool]]:
    """Return which axis of the file points right, to the front and to the head, and whether the other way round."""
    found = io_orientation(affine.numpy(force=True))
    order = np.argsort(found[:, 0]).tolist()
    return order, [bool(found[source, 1] < 0) for source in order]


def _scale_intensities(volume: Tensor) -> Tensor:
    """Return intensities in [0, 1], from the 0.5 to the 99.5 percentile; 0 for what is no finite number."""
    volume = volume.float()
    # Every n-th voxel will do, and torch.quantile takes no more than 2^24.
    known = volume.flatten()[:: max(volume.numel() // 2**20, 1)]
    known = known[known.isfinite()]
    low, high = known.quantile(torch.tensor([0.005, 0.995])).tolist() if known.numel() else (0.0, 1.0)
    return ((volume.nan_to_num(low, high, low) - low) / max(high - low, 1e-12)).clamp(0, 1)


def _find_fullest(label: Tensor, axis: int) -> int:
    """Return the slice with most label voxels, the middle one where there is none."""
    held = (label > 0).sum([dim for dim in range(3) if dim != axis])
    return int(held.argmax()) if bool(held.any()) else label.shape[axis] // 2


def _find_content(volumes: Sequence[Tensor]) -> list[slice]:
    """Return the box around what is not dark in the image, label and prediction; all of an image that is dark."""
    grey, *labels = volumes
    seen = grey > DARK
    seen = reduce(torch.logical_or, labels, seen) if bool(seen.any()) else torch.ones_like(seen)
    held = [seen.movedim(axis, 0).flatten(1).any(1).nonzero() for axis in range(3)]
    return [slice(int(planes[0]), int(planes[-1]) + 1) for planes in held]


def _choose_layout(extents: Sequence[float], spacing: Sequence[float], min_side: int) -> tuple[bool, float]:
    """Return whether the coronal slice is below the sagittal one, where less stays empty, and pixels per mm.

    The picture is ``min_side`` high, and no voxel is smaller than a pixel, within bounds.
    """
    across, along, upward = extents
    row = along + 2 * across, max(upward, along)
    stack = max(along, across) + across, max(2 * upward, along)
    is_stacked = math.prod(stack) < math.prod(row)
    width, height = stack if is_stacked else row
    return is_stacked, min(max(min_side / height, 1 / min(spacing)), LONGEST * min_side / max(width, height))


def _paint(cut: Sequence[Tensor], size: tuple[int, int], line: int) -> Tensor:
    """Return a plane of image, label and perhaps prediction with tints and lines, ``(3, *size)`` in [0, 1]."""
    plane, *labels = cut
    grey = functional.interpolate(plane[None, None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    truth, *predicted = (_enlarge(each, size) for each in labels)
    colours = _colour(truth)
    picture = torch.where(truth > 0, (1 - TINT) * grey + TINT * colours, grey)
    picture = torch.where(_find_border(truth, line), colours, picture)
    for found in predicted:
        picture = torch.where(_find_border(found, line), (1 - PALE) * _colour(found) + PALE, picture)
    return picture


def _enlarge(labels: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(labels[None, None].float(), size, mode="nearest-exact")[0, 0].long()


def _colour(labels: Tensor) -> Tensor:
    return PALETTE[(labels - 1).clamp_min(0) % len(PALETTE)].permute(2, 0, 1) / 255


def _find_border(labels: Tensor, width: int) -> Tensor:
    """Return the pixels of structures within ``width`` of something else, or of the picture's edge."""
    high = low = functional.pad(labels.int(), (width,) * 4)
    for dim in (0, 1):  # by shifted copies: max_pool2d takes four times as long on a CPU
        high, low = (_join(torch.maximum, high, width, dim), _join(torch.minimum, low, width, dim))
    return (labels > 0) & (high != low)


def _join(extreme: Callable[[Tensor, Tensor], Tensor], ringed: Tensor, width: int, dim: int) -> Tensor:
    """Return the extreme of all values within ``width`` along a dim, without the ring of that width."""
    size = ringed.shape[dim] - 2 * width
    return reduce(extreme, (ringed.narrow(dim, begin, size) for begin in range(2 * width + 1)))


def _frame(panel: Tensor, title: str, sides: tuple[str, str], min_width: int) -> Tensor:
    """Return a panel as uint8 with its title above it, and the patient's sides in it."""
    size = max(round(min_width / 6.5), 10)
    font = ImageFont.load_default(size)
    margin = round(1.6 * size)
    width = max(panel.shape[-1], min_width, math.ceil(font.getlength(title)) + 4)
    panel = functional.pad(panel, (*_centre(panel.shape[-1], width), margin, 0))
    drawn = Image.fromarray((panel * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(drawn)
    pen.text((2, round(0.2 * size)), title, fill=TEXT, font=font)
    middle = margin + (panel.shape[-2] - margin) // 2
    for place, side, anchor in ((4, sides[0], "lm"), (width - 5, sides[1], "rm")):
        pen.text((place, middle), side, fill=TEXT, font=font, anchor=anchor, stroke_width=2, stroke_fill=(0, 0, 0))
    return torch.from_numpy(np.array(drawn)).permute(2, 0, 1)


def _put_together(panels: Sequence[Tensor], dim: int) -> Tensor:
    """Return panels beside each other (``dim`` -1), or below each other (-2), with gaps."""
    height, width = (max(panel.shape[axis] for panel in panels) for axis in (-2, -1))
    padded = []
    for panel in panels:
        gap = 0 if panel is panels[-1] else GAP
        right, below = (gap, height - panel.shape[-2]) if dim == -1 else (width - panel.shape[-1], gap)
        padded.append(functional.pad(panel, (0, right, 0, below)))
    return torch.cat(padded, dim)


def _centre(size: int, wanted: int) -> tuple[int, int]:
    """Return what is to be added before and after."""
    return (wanted - size) // 2, wanted - size - (wanted - size) // 2
