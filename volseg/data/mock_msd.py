"""Synthetic mocks of the Decathlon's tasks: their channels, labels, units and grids, with fewer voxels.

A mock tries a config in seconds, instead of the task's gigabytes and hours. From the task's manifest come channels,
labels, the spacing of the stored cases and its variation, and the proportions of the field of view. Two properties are
guesses: the orientation of the files (known only for Task04: RAS), and the variation of spacings if the manifest has no
range.

Scenes are drawn in the patient and not on voxels. Positions are fractions of the field of view, -1 to 1 along the
patient's right, front and head. A scene returns clean intensities ``(C, D, H, W)`` and the label map. CT is in
Hounsfield units of air, fat, muscle, organs and bone; MR is in arbitrary units. Structures have the proportions of
anatomy, not its shapes: a tumour is in its organ, vessels are thin, the liver is on the right, the spleen on the left.
Grey value, place, or both distinguish a structure from its surroundings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from volseg.config.catalogue import get_public_task
from volseg.data.synthetic import SyntheticGrid, as_nifti, draw_hippocampus, draw_texture, scan, write_task
from volseg.errors import DataError

LONGEST_SIDE = 48
"""Voxels of a mock's longest side, without a given scale."""

SHORTEST_SIDE = 16
"""Fewest voxels of a side, if the task's has as many: thin volumes would lose all their planes."""

VARIATION = 0.1
"""Relative variation of voxel sides between cases, if it is unknown."""

SHARE_OF_FINE = 0.25
"""Share of the cases with slices as close as the task's target spacing, if that is below the median."""

STORED = [(1, 1), (-1, 1), (-1, -1)]
"""Signs of the first two axes in files: RAS, LAS, LPS."""

NOISE = 12.0
"""Standard deviation of the noise, in Hounsfield units."""


def make_mock_task(
    root: str | Path, like: str, *, num_cases: int = 24, num_test: int = 4, seed: int = 0, scale: float | None = None
) -> Path:
    """Write a synthetic mock of a task in MSD layout; the same arguments write the same bytes.

    Parameters
    ----------
    root, num_cases, num_test, seed
        As for `make_task`.
    like : str
        The task, such as ``Task09_Spleen`` or ``9``.
    scale : float, optional
        Scale of the sides in voxels, relative to the task's median case; by default 48 voxels along the longest side.

    Returns
    -------
    Path
        ``root``.

    Raises
    ------
    DataError
        If there is no such task, the scale is out of range, or ``root`` has other content.
    """
    manifest = get_public_task(like).manifest
    shape = _read_shape(manifest)
    scale = min(1.0, LONGEST_SIDE / max(shape)) if scale is None else scale
    if not 0 < scale <= 1:
        raise DataError(f"the scale of a mock must lie above 0 and be at most 1, got {scale}")
    described = {
        "name": manifest["name"].partition("_")[2],
        "description": f"Synthetic twin of {manifest['name']}, drawn by a program",
        "tensorImageSize": manifest["tensor_image_size"],
        "modality": {str(number): name for number, name in enumerate(manifest["modalities"])},
        "labels": {str(value): name for value, name in manifest["labels"].items()},
    }
    draw = partial(_draw_case, manifest, np.array(shape) * scale)
    return write_task(root, described, draw, num_cases=num_cases, num_test=num_test, seed=seed)


def _read_shape(manifest: Mapping[str, Any]) -> list[int]:
    """Return the median shape of the stored files or, if unknown, that of the box of voxels that are not 0."""
    return manifest["stored"]["shape"][1] if "stored" in manifest else manifest["nnunet"]["fingerprint"]["median_shape"]


def _draw_case(
    manifest: Mapping[str, Any], sides: np.ndarray, rng: np.random.Generator
) -> tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]:
    grid = _draw_grid(manifest, sides, rng)
    positions = grid.positions()
    if manifest["name"] in SCENES:
        extent = np.array(grid.shape) * np.linalg.norm(grid.affine[:3, :3], axis=0) / 2
        channels, label = SCENES[manifest["name"]](positions / extent, rng)
    else:
        clean, label = draw_hippocampus(positions, rng)
        channels = clean[None] * 10 ** rng.uniform(2, 4)  # scanners' units differ by orders of magnitude
    scanned = np.stack([_scan(manifest, channel, positions, rng) for channel in channels], axis=-1)
    voxels = np.round(scanned).astype(np.int16)
    return as_nifti(voxels if voxels.shape[-1] > 1 else voxels[..., 0], grid.affine), as_nifti(label, grid.affine)


def _draw_grid(manifest: Mapping[str, Any], sides: np.ndarray, rng: np.random.Generator) -> SyntheticGrid:
    """Lay voxels with the sides of a stored case around the origin; ``sides`` gives the field of view."""
    median = np.array(manifest["nnunet"]["fingerprint"]["median_spacing"], dtype=np.float64)
    fine = np.array(manifest["nnunet"]["spacing"], dtype=np.float64)
    spacing = np.where(rng.random() < SHARE_OF_FINE, np.minimum(fine, median), median)
    if "stored" in manifest:
        low, _, high = np.array(manifest["stored"]["spacing"], dtype=np.float64)
    else:
        low, high = spacing * (1 - VARIATION), spacing * (1 + VARIATION)
    planes, slices = rng.uniform(1 - VARIATION, 1 + VARIATION, 2)  # pixels are square
    spacing = np.clip(spacing * (planes, planes, slices), low, high)
    least = np.minimum(_read_shape(manifest), SHORTEST_SIDE)
    shape = np.maximum(np.round(np.maximum(sides, least) * median / spacing), least).astype(int)
    is_known = manifest["name"] == "Task04_Hippocampus"
    signs = np.array([*(STORED[0] if is_known else STORED[rng.integers(len(STORED))]), 1])
    affine = np.diag([*(signs * spacing), 1.0])
    affine[:3, 3] = -affine[:3, :3] @ ((shape - 1) / 2)
    return SyntheticGrid((int(shape[0]), int(shape[1]), int(shape[2])), affine)


def _scan(
    manifest: Mapping[str, Any], clean: np.ndarray, positions: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    if manifest["modalities"] == ["CT"]:
        return np.clip(clean + rng.normal(0, NOISE, clean.shape), -1024, 3071)
    unit = clean.max()
    # Voxels that were cut away, or never imaged, are exactly 0.
    return np.where(clean == 0, 0, np.minimum(unit * scan(clean / unit, positions, rng), np.iinfo(np.int16).max))


Floats = NDArray[np.float64]
Labels = NDArray[np.uint8]
Scene = Callable[[Floats, np.random.Generator], tuple[Floats, Labels]]

AIR, LUNG, FAT, MUSCLE, BONE = -1000.0, -850.0, -100.0, 50.0, 500.0
"""Hounsfield units."""


def draw_brain_tumour(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a brain without its skull, 0 around it, and in one half oedema about a tumour whose rim enhances."""
    head = depth_in_ellipsoid(at, (0, 0, 0), (0.72, 0.86, 0.85))
    centre = (rng.choice((-1, 1)) * rng.uniform(0.25, 0.4), rng.uniform(-0.3, 0.3), rng.uniform(-0.2, 0.3))
    radius = rng.uniform(0.32, 0.42)
    tumour = depth_in_ellipsoid(at, centre, radius * rng.uniform(0.85, 1.15, 3)) + 0.1 * draw_texture(
        at.shape[:3], 3, rng
    )
    label = np.zeros(at.shape[:3], np.uint8)
    for value, depth in ((1, 0.0), (3, 0.4), (2, 0.65)):  # the core is in the rim, the rim in the oedema
        label[(tumour > depth) & (head > 0.05)] = value
    ventricle = np.maximum(*(depth_in_ellipsoid(at, (side * 0.1, 0, 0.1), (0.06, 0.35, 0.12)) for side in (-1, 1)))
    tissue = 1 + 0.1 * np.clip(draw_texture(at.shape[:3], 2, rng), -2, 2)
    channels = []
    for brain, fluid, *values in (  # FLAIR, T1, T1 with contrast, T2; oedema, core, rim
        (600, 150, 1250, 800, 950),
        (650, 250, 500, 350, 550),
        (650, 250, 520, 400, 1500),
        (550, 1500, 1150, 1300, 850),
    ):
        image = np.where(ventricle > 0, fluid, brain) * tissue
        image = paint(image, label, dict(enumerate(values, 1)))
        channels.append(np.where(head > 0, image, 0))
    return np.stack(channels), label


def draw_heart(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a left atrium with the veins that enter it, the ventricles beside it, and a border that was not imaged."""
    centre = np.array([-0.1, -0.15, 0.1]) + rng.uniform(-0.08, 0.08, 3)
    atrium = depth_in_ellipsoid(at, centre, rng.uniform(0.22, 0.3, 3))
    for side, height in ((-1, 0.1), (-1, -0.12), (1, 0.1), (1, -0.12)):
        end = shift(centre, side * 0.5, -0.15, 1.5 * height)
        atrium = np.maximum(atrium, depth_in_tube(at, (centre, end), 0.08))
    ventricles = np.maximum(
        depth_in_ellipsoid(at, shift(centre, -0.15, 0.45, -0.25), (0.25, 0.3, 0.35)),
        depth_in_ellipsoid(at, shift(centre, 0.25, 0.4, -0.2), (0.22, 0.25, 0.32)),
    )
    image = 350 + 60 * draw_texture(at.shape[:3], 3, rng)
    image[lungs(at) > 0] = 80
    image[ventricles > 0] = 1000
    image[atrium > 0] = 1100
    image[np.abs(at[..., 0]) > 0.85] = 0
    return image[None], (atrium > 0).astype(np.uint8)


def draw_liver(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a liver with one to three dark tumours in it."""
    image, liver = draw_abdomen_with_liver(at, rng)
    label = (liver > 0).astype(np.uint8)
    for _ in range(rng.integers(1, 4)):
        centre = LIVER + rng.uniform(-0.2, 0.2, 3)
        label[(depth_in_ellipsoid(at, centre, (rng.uniform(0.08, 0.16),) * 3) > 0) & (label > 0)] = 2
    return paint(image, label, {1: 108, 2: 55})[None], label


def draw_prostate(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw the transition zone (label 2) with the peripheral zone (1) about its back, on T2 and ADC."""
    centre = rng.uniform(-0.1, 0.1, 3) * (1, 1, 0.5)
    size = rng.uniform(0.85, 1.15)
    whole = depth_in_ellipsoid(at, centre, size * np.array([0.32, 0.28, 0.75]))
    inner = depth_in_ellipsoid(at, shift(centre, 0, 0.08, 0.05), size * np.array([0.24, 0.19, 0.65]))
    label = np.where(inner > 0, 2, np.where((whole > 0) & (at[..., 1] < centre[1] + 0.12), 1, 0)).astype(np.uint8)
    texture = draw_texture(at.shape[:3], 2, rng)
    bladder = depth_in_ellipsoid(at, shift(centre, 0, 0.35, 0.6), (0.25, 0.2, 0.3)) > 0
    t2 = np.where(bladder, 900.0, 180 + 30 * texture)
    adc = np.where(bladder, 2600.0, 800 + 80 * texture)
    return np.stack([paint(t2, label, {1: 480, 2: 290}), paint(adc, label, {1: 1700, 2: 1250})]), label


def draw_lung(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a chest with a tumour in one of the lungs."""
    image = draw_trunk(at, rng)
    air = lungs(at)
    image[air > 0] = LUNG
    side = rng.choice((-1, 1))
    centre = np.array([side * 0.42, 0, 0]) + rng.uniform(-0.12, 0.12, 3)
    tumour = depth_in_ellipsoid(at, centre, rng.uniform(0.1, 0.2, 3))
    label = (tumour > 0).astype(np.uint8)
    return paint(image, label, {1: 35})[None], label


def draw_pancreas(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a pancreas across the spine with a dark tumour in its head, its body or its tail."""
    image, liver = draw_abdomen_with_liver(at, rng)
    image[liver > 0] = 108
    points = np.array([[0.22, 0.05, -0.25], [0.08, 0.12, -0.05], [-0.2, 0.08, 0.1], [-0.45, -0.08, 0.22]])
    points = points + rng.uniform(-0.05, 0.05, points.shape)
    pancreas = depth_in_tube(at, points, 0.11)
    tumour = depth_in_ellipsoid(at, points[rng.integers(len(points))], (rng.uniform(0.1, 0.14),) * 3)
    label = (pancreas > 0).astype(np.uint8)
    label[tumour > 0] = 2
    return paint(image, label, {1: 90, 2: 20})[None], label


def draw_hepatic_vessel(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw bright vessels that branch in a liver, and a dark tumour beside them."""
    image, liver = draw_abdomen_with_liver(at, rng)
    image[liver > 0] = 100
    label = np.zeros(at.shape[:3], np.uint8)
    tumour = depth_in_ellipsoid(at, LIVER + rng.uniform(-0.2, 0.2, 3), rng.uniform(0.1, 0.17, 3))
    label[(tumour > 0) & (liver > 0)] = 2
    hilum = shift(LIVER, -0.3, -0.1, -0.15)
    for _ in range(3):
        fork = LIVER + rng.uniform(-0.15, 0.15, 3)
        ends = LIVER + rng.uniform(-0.35, 0.35, (2, 3))
        for route in ((hilum, fork), *((fork, end) for end in ends)):
            label[(depth_in_tube(at, route, 0.045) > 0) & (liver > 0)] = 1
    return paint(image, label, {1: 170, 2: 45})[None], label


def draw_spleen(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a spleen at the left back, opposite to the liver."""
    image, liver = draw_abdomen_with_liver(at, rng)
    image[liver > 0] = 108
    centre = np.array([-0.5, -0.2, 0.15]) + rng.uniform(-0.06, 0.06, 3)
    spleen = depth_in_ellipsoid(at, centre, rng.uniform(0.8, 1.2) * np.array([0.16, 0.28, 0.4]))
    label = (spleen > 0).astype(np.uint8)
    return paint(image, label, {1: 120})[None], label


def draw_colon(at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw a colon around the abdomen, with air inside and a cancer that thickens its wall at one place."""
    image = draw_trunk(at, rng)
    corners = [(0.5, -0.5), (0.52, 0.4), (0, 0.5), (-0.52, 0.45), (-0.5, -0.4), (-0.1, -0.75)]
    points = np.array([[x, 0.15, z] for x, z in corners]) + rng.uniform(-0.05, 0.05, (len(corners), 3))
    image[depth_in_tube(at, points, 0.13) > 0] = 35
    place = rng.integers(1, len(points) - 1)
    cancer = depth_in_ellipsoid(at, points[place], rng.uniform(0.16, 0.22, 3))
    label = ((cancer > 0) & (depth_in_tube(at, points, 0.2) > 0)).astype(np.uint8)
    image = paint(image, label, {1: 95})
    inside = depth_in_tube(at, points, 0.07) > 0
    image[inside] = -900
    label[inside] = 0
    return image[None], label


SCENES: Mapping[str, Scene] = {
    "Task01_BrainTumour": draw_brain_tumour,
    "Task02_Heart": draw_heart,
    "Task03_Liver": draw_liver,
    "Task05_Prostate": draw_prostate,
    "Task06_Lung": draw_lung,
    "Task07_Pancreas": draw_pancreas,
    "Task08_HepaticVessel": draw_hepatic_vessel,
    "Task09_Spleen": draw_spleen,
    "Task10_Colon": draw_colon,
}
"""Scene of each task; the hippocampus is that of `volseg.data.synthetic`, in mm."""

LIVER = np.array([0.35, 0.05, 0.1])
"""Centre of the liver."""


def draw_trunk(at: Floats, rng: np.random.Generator) -> Floats:
    """Return a trunk in air: skin and fat, muscle, the spine."""
    flat = at * (1, 1, 0)
    skin = depth_in_ellipsoid(flat, (0, 0, 0), (0.95, 0.8, 1))
    texture = draw_texture(at.shape[:3], 2, rng)
    image = np.where(skin > 0.1, MUSCLE + 8 * texture, FAT + 8 * texture)
    image[skin < 0] = AIR
    image[depth_in_ellipsoid(flat, (0, -0.5, 0), (0.12, 0.12, 1)) > 0] = BONE
    return image


def draw_abdomen_with_liver(at: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return a trunk, and each voxel's depth in its liver, which is not painted yet."""
    image = draw_trunk(at, rng)
    fat = depth_in_ellipsoid(at, (-0.2, 0.25, -0.3), (0.35, 0.2, 0.4)) > 0
    image[fat] = FAT
    return image, depth_in_ellipsoid(at, LIVER, rng.uniform(0.9, 1.1) * np.array([0.38, 0.42, 0.55]))


def lungs(at: Floats) -> Floats:
    """Return each voxel's depth in one of the lungs."""
    return np.maximum(*(depth_in_ellipsoid(at, (side * 0.42, 0, 0), (0.32, 0.5, 0.9)) for side in (-1, 1)))


def paint(image: Floats, label: Labels, values: Mapping[int, float]) -> Floats:
    """Return the image with the intensity of each structure, which keeps a little of the texture below."""
    for value, intensity in values.items():
        here = label == value
        image = np.where(here, intensity + 0.1 * (image - image[here].mean() if here.any() else image), image)
    return image


def shift(point: Floats, right: float, front: float, up: float) -> Floats:
    """Return a point moved by some distances."""
    return point + np.array([right, front, up])


def depth_in_ellipsoid(at: Floats, centre: Sequence[float] | Floats, radii: Sequence[float] | Floats) -> Floats:
    """Return 1 in the centre, 0 on the surface, less outside."""
    return 1 - np.linalg.norm((at - np.asarray(centre)) / np.asarray(radii), axis=-1)


def depth_in_tube(at: Floats, points: Sequence[Floats] | Floats, radius: float) -> Floats:
    """Return each voxel's depth in a tube along straight lines between points, as a fraction of the radius."""
    depths = []
    for start, end in pairwise(points):
        along = np.clip((at - start) @ (end - start) / ((end - start) ** 2).sum(), 0, 1)
        depths.append(1 - np.linalg.norm(at - start - along[..., None] * (end - start), axis=-1) / radius)
    return np.max(depths, axis=0)
