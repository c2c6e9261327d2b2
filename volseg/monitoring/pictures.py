"""Draw slices of a case as a picture: the image, with outlines of label and prediction.

Outlines hide less of the image than coloured areas. A label has a coloured outline and a faint tint inside it, a
prediction a pale outline of the same hue. The outlines coincide where both agree. Missed structures have a tint without
a pale outline, false structures a pale outline without a tint.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from nibabel.orientations import io_orientation
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import maximum_filter, minimum_filter
from torch import Tensor
from torch.nn import functional

from volseg.data.labels import LABEL_COLOURS
from volseg.workflow.validation import Example

PALETTE = torch.tensor(LABEL_COLOURS, dtype=torch.float32)

PLANES = ("sagittal", "coronal", "axial")
"""Plane across each axis of a volume from `face_patient`."""

SIDES = (("A", "P"), ("R", "L"), ("R", "L"))
"""Patient's sides at the left and right of each plane: seen from the feet, as in radiology."""

TINT = 0.18
PALE = 0.6
"""Share of white in the outline of a prediction."""

TEXT = (205, 205, 205)
GAP = 6
SAMPLES = 4
"""Number of samples of a batch to draw."""

LONGEST = 4
"""Longest side of a picture of a long, thin volume, in multiples of ``min_side``."""


def draw_example(example: Example, *, channel: int = 0, min_side: int = 512) -> Tensor:
    """Return a picture of a validated case, oriented by `face_patient`; see `draw_slices`."""
    affine = example.affine
    image, label, prediction = (
        face_patient(volume, affine) for volume in (example.image, example.label, example.prediction)
    )
    spacing = [float(affine[:3, source].norm()) for source in _find_axes(affine)[0]]
    return draw_slices(image, label, prediction, spacing=spacing, channel=channel, min_side=min_side)


def draw_patches(images: Tensor, labels: Tensor, *, channel: int = 0) -> Tensor:
    """Return a picture of a batch's first samples, one below the other; see `draw_slices`.

    Parameters
    ----------
    images, labels : Tensor
        ``(B, C, D, H, W)`` and ``(B, D, H, W)`` or ``(B, 1, D, H, W)``, on any device.
    channel : int
        Channel of the images to draw.
    """
    chosen = images[:SAMPLES].detach().cpu(), labels[:SAMPLES].flatten(1).unflatten(1, (-1, *labels.shape[-3:])).cpu()
    samples = zip(*chosen, strict=True)
    return _put_together(
        [draw_slices(image, label[0], spacing=(1, 1, 1), channel=channel, min_side=256) for image, label in samples], -2
    )


def face_patient(volume: Tensor, affine: Tensor) -> Tensor:
    """Return a volume ``(..., D, H, W)`` with axes permuted and flipped towards the patient's right, front and head.

    Parameters
    ----------
    volume : Tensor
        Voxels in the order of the file.
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
    """Return a uint8 picture ``(3, height, width)`` of the slice with the most label voxels along each axis.

    Parameters
    ----------
    image : Tensor
        ``(D, H, W)`` or ``(C, D, H, W)`` with any intensities, NaN included. The titles and sides are right if its axes
        point to the right, the front and the head (`face_patient`).
    label : Tensor
        ``(D, H, W)``, integers; 0 is not drawn.
    prediction : Tensor, optional
        As ``label``. If the label is empty, the prediction determines the slices.
    spacing : sequence of float
        Sides of a voxel along D, H and W in mm, which set the proportions of the picture.
    channel : int
        Channel of the image to draw.
    min_side : int
        Smallest height and width of the picture in pixels.
    """
    image, label = image.as_subclass(Tensor), label.as_subclass(Tensor)  # without the metadata of a MetaTensor
    prediction = None if prediction is None else prediction.as_subclass(Tensor)
    volume = image if image.ndim == 3 else image[channel]
    shown = label if prediction is None or bool((label > 0).any()) else prediction
    volumes = [each for each in (_scale_intensities(volume), label, prediction) if each is not None]
    extents = [size * side for size, side in zip(volume.shape, spacing, strict=True)]
    # At least ``min_side`` high, and a voxel at least one pixel, unless the picture exceeds `LONGEST`.
    long, high = 2 * extents[0] + extents[1], max(extents[1:])
    pixels = min(max(min_side / high, 1 / min(spacing)), LONGEST * min_side / max(long, high))
    # Pages show all pictures at the same width, so text and lines grow with it.
    width = max(min_side, round(long * pixels))
    panels = []
    for axis in range(3):
        index = _find_fullest(shown, axis)
        across, upward = (dim for dim in range(3) if dim != axis)
        size = (max(round(extents[upward] * pixels), 1), max(round(extents[across] * pixels), 1))
        # Head up; the patient's right or front to the left.
        cut = [each.select(axis, index).mT.flip(-2, -1) for each in volumes]
        panel = _paint(cut, size, line=max(round(width / 256), 1))
        title = f"{PLANES[axis]} {index + 1} / {volume.shape[axis]}"
        panels.append(_frame(panel, title, SIDES[axis], width // 4))
    row = _put_together(panels, -1)
    height, width = row.shape[-2:]
    return functional.pad(row, (0, max(min_side - width, 0), 0, max(min_side - height, 0)))


def _find_axes(affine: Tensor) -> tuple[list[int], list[bool]]:
    """Return the file's axes towards right, front and head, and whether each points the opposite way."""
    found = io_orientation(affine.numpy(force=True))
    order = np.argsort(found[:, 0]).tolist()
    return order, [bool(found[source, 1] < 0) for source in order]


def _scale_intensities(volume: Tensor) -> Tensor:
    """Return intensities scaled from their 0.5 and 99.5 percentiles to [0, 1]; NaN becomes 0."""
    volume = volume.float()
    # Every n-th voxel suffices, and torch.quantile takes at most 2^24 values.
    known = volume.flatten()[:: max(volume.numel() // 2**20, 1)]
    known = known[known.isfinite()]
    low, high = known.quantile(torch.tensor([0.005, 0.995])).tolist() if known.numel() else (0.0, 1.0)
    return ((volume.nan_to_num(low, high, low) - low) / max(high - low, 1e-12)).clamp(0, 1)


def _find_fullest(label: Tensor, axis: int) -> int:
    """Return the index of the slice with the most label voxels, or of the middle slice if there are none."""
    held = (label > 0).sum([dim for dim in range(3) if dim != axis])
    return int(held.argmax()) if bool(held.any()) else label.shape[axis] // 2


def _paint(cut: Sequence[Tensor], size: tuple[int, int], line: int) -> Tensor:
    """Return a plane of the image with tints and outlines of its labels, ``(3, *size)`` in [0, 1]."""
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
    """Return the pixels of structures within ``width`` of another value, or of the picture's edge."""
    low, high = (
        torch.from_numpy(extreme(labels.numpy(), 2 * width + 1, mode="constant"))
        for extreme in (minimum_filter, maximum_filter)
    )
    return (labels > 0) & (high != low)


def _frame(panel: Tensor, title: str, sides: tuple[str, str], min_width: int) -> Tensor:
    """Return a panel as uint8 with its title above, and the letters of the patient's sides inside."""
    size = max(round(min_width / 6.5), 10)
    font = ImageFont.load_default(size)
    margin = round(1.6 * size)
    width = max(panel.shape[-1], min_width, math.ceil(font.getlength(title)) + 4)
    panel = functional.pad(panel, (0, width - panel.shape[-1], margin, 0))
    drawn = Image.fromarray((panel * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(drawn)
    pen.text((2, round(0.2 * size)), title, fill=TEXT, font=font)
    middle = margin + (panel.shape[-2] - margin) // 2
    for place, side, anchor in ((4, sides[0], "lm"), (width - 5, sides[1], "rm")):
        pen.text((place, middle), side, fill=TEXT, font=font, anchor=anchor, stroke_width=2, stroke_fill=(0, 0, 0))
    return torch.from_numpy(np.array(drawn)).permute(2, 0, 1)


def _put_together(panels: Sequence[Tensor], dim: int) -> Tensor:
    """Return panels side by side (``dim`` -1) or stacked (-2), with gaps behind each."""
    height, width = (max(panel.shape[axis] for panel in panels) for axis in (-2, -1))
    padded = []
    for panel in panels:
        right, below = (GAP, height - panel.shape[-2]) if dim == -1 else (width - panel.shape[-1], GAP)
        padded.append(functional.pad(panel, (0, right, 0, below)))
    return torch.cat(padded, dim)
