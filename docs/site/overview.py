"""Draw the README's picture: a CT with its labels as slabs on four GPUs, and the report of a training.

    python docs/site/overview.py DIR/slab_3mm.nii.gz DIR/slab_3mm_labels.nii.gz

`ModelParallel` cuts the volume, on the CPU; the picture has the slabs that it returns. The report is the picture of
``docs/images/report_light.png`` (see screenshots.py).
"""

import argparse
import colorsys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from volseg import ModelParallel, read_volume

Point = tuple[float, float]

IMAGES = Path(__file__).parents[1] / "images"
NUM_GPUS = 4
WINDOW = (-160.0, 240.0)
"""Hounsfield units from black to white: soft tissue."""
SIZE = (1500, 610)
REPORT_HEIGHT = 590
PIXELS = 4
"""Per voxel."""
GAP = 84
DEPTH = (0.5, -0.42)
"""Where a voxel further from the viewer is drawn, in voxels of the front."""
TINT = 0.55
SHADE = 0.7
"""Brightness of the sides beside the front's."""


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("image", type=Path, help="a CT")
    parser.add_argument("labels", type=Path, help="its label map")
    parser.add_argument("-o", "--output", type=Path, default=IMAGES / "overview.png")
    given = parser.parse_args()
    image, labels = (read_volume(path)[0].numpy() for path in (given.image, given.labels))
    picture = Image.new("RGB", SIZE, "white")
    draw_slabs(picture, colour(image, labels), cut(image))
    report = Image.open(IMAGES / "report_light.png").convert("RGB")
    report = report.resize(
        (round(report.width * REPORT_HEIGHT / report.height), REPORT_HEIGHT), Image.Resampling.LANCZOS
    )
    corner = (SIZE[0] - report.width - 10, (SIZE[1] - REPORT_HEIGHT) // 2)
    picture.paste(report, corner)
    frame = (corner[0] - 1, corner[1] - 1, corner[0] + report.width, corner[1] + REPORT_HEIGHT)
    ImageDraw.Draw(picture).rectangle(frame, outline="#b0b0b8")
    picture.quantize(256, dither=Image.Dither.NONE).save(given.output, optimize=True)
    print(f"{given.output}: {given.output.stat().st_size / 1000:.0f} kB")


def cut(image: NDArray[np.float32]) -> list[slice]:
    """Return the part of the first axis that each GPU gets."""
    model = ModelParallel(nn.Conv3d(1, 1, 3, padding=1), strategy="spatial", devices=["cpu"] * NUM_GPUS)
    with torch.no_grad():
        slabs = model(torch.from_numpy(image)[None, None].float()).slabs
    stops = np.cumsum([slab.shape[2] for slab in slabs])
    return [slice(stop - slab.shape[2], stop) for slab, stop in zip(slabs, stops.tolist(), strict=True)]


def colour(image: NDArray[np.float32], labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the window of the image in grey, with a tint for each label: ``(D, H, W, 3)``."""
    low, high = WINDOW
    grey = np.clip((image - low) / (high - low), 0, 1)[..., None].repeat(3, -1)
    for number, label in enumerate(np.unique(labels[labels > 0])):
        hue = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.75, 1.0)  # the golden ratio: neighbours differ
        inside = labels == label
        grey[inside] = (1 - TINT) * grey[inside] + TINT * np.array(hue)
    return (255 * grey).astype(np.uint8)


def draw_slabs(picture: Image.Image, voxels: NDArray[np.uint8], parts: list[slice]) -> None:
    """Draw the slabs side by side, seen from the front and the right, each with its GPU."""
    _, height, depth, _ = voxels.shape
    draw = ImageDraw.Draw(picture)
    up = -DEPTH[1] * depth * PIXELS
    left, top = 20.0, 66 + up
    draw.text((left, 12), f"One volume on {len(parts)} GPUs", "black", font(26))
    for number, part in enumerate(parts):
        slab = voxels[part, ::-1]  # the front of the patient upward
        width = slab.shape[0]
        for face, corner, across, down in list_faces(slab, (left, top)):
            paste(picture, face, corner, across, down)
        middle = left + width * PIXELS / 2
        below = top + height * PIXELS + 6
        draw.text((middle, below), f"GPU {number}", "black", font(20), anchor="ma")
        draw.text((middle, below + 24), f"{width} x {height} x {depth}", "#555560", font(15), anchor="ma")
        left += width * PIXELS + GAP


def list_faces(slab: NDArray[np.uint8], corner: Point) -> Iterator[tuple[NDArray[np.uint8], Point, Point, Point]]:
    """Yield the top, the right and the front of a slab: rows of voxels, first corner, and the steps of a voxel."""
    width, depth = slab.shape[0], slab.shape[2]
    shaded = (slab * SHADE).astype(np.uint8)
    x, y = corner
    back = (DEPTH[0] * PIXELS, DEPTH[1] * PIXELS)
    right, down = (float(PIXELS), 0.0), (0.0, float(PIXELS))
    behind = (back[0] * depth, back[1] * depth)
    yield shaded[:, 0].transpose(1, 0, 2)[::-1], (x + behind[0], y + behind[1]), right, (-back[0], -back[1])
    yield shaded[-1], (x + width * PIXELS, y), back, down
    yield slab[:, :, 0].transpose(1, 0, 2), (x, y), right, down


def paste(picture: Image.Image, face: NDArray[np.uint8], corner: Point, across: Point, down: Point) -> None:
    """Draw rows of voxels as a parallelogram."""
    rows, columns = face.shape[:2]
    to_picture = np.array([[across[0], down[0], corner[0]], [across[1], down[1], corner[1]], [0, 0, 1]])
    to_face = np.linalg.inv(to_picture)[:2].ravel().tolist()
    solid = np.full((rows, columns), 255, np.uint8)
    drawn, mask = (
        Image.fromarray(array).transform(picture.size, Image.Transform.AFFINE, to_face, Image.Resampling.NEAREST)
        for array in (np.ascontiguousarray(face), solid)
    )
    picture.paste(drawn, (0, 0), mask)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font."""
    return ImageFont.load_default(size)


if __name__ == "__main__":
    main()
