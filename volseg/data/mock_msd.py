"""Synthetic mocks of the Decathlon's tasks: their channels, labels, units and grids, with fewer voxels.

With a mock, a config can be tried in seconds, without the task's gigabytes and hours. The task's manifest determines
channels, labels, the spacing of the stored cases and its variation, and the proportions of the field of view. Two
properties are guesses: the orientation of the files (known only for Task04: RAS), and the variation of spacings if the
manifest has no range.

Scenes are drawn in the patient, not in voxels. Positions are fractions of the field of view, -1 to 1 along the
patient's right, front and head. A scene is a table of structures, painted one after another. CT is in Hounsfield units
of air, fat, muscle, organs and bone; MR is in arbitrary units. Structures have the proportions of anatomy, not its
shapes: a tumour is in its organ, vessels are thin, the liver is on the right, the spleen on the left. Grey value,
place, or both distinguish a structure from its surroundings.
"""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np
from numpy.typing import NDArray

from volseg.config.catalogue import get_public_task
from volseg.data.synthetic import SyntheticGrid, as_nifti, draw_hippocampus, draw_texture, scan, write_task
from volseg.errors import DataError

LONGEST_SIDE = 48
"""Voxels of a mock's longest side, if no scale is given."""

SHORTEST_SIDE = 16
"""Fewest voxels of a side, unless the task has fewer: thin volumes would lose all their planes."""

VARIATION = 0.1
"""Relative variation of voxel sides between cases, if the manifest has none."""

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
        raise DataError(f"the scale of mock data must be above 0 and at most 1, got {scale}")
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
        channels, label = draw_scene(SCENES[manifest["name"]], positions / extent, rng)
    else:
        clean, label = draw_hippocampus(positions, rng)
        channels = clean[None] * 10 ** rng.uniform(2, 4)  # scanners' units differ by orders of magnitude
    scanned = np.stack([_scan(manifest, channel, positions, rng) for channel in channels], axis=-1)
    voxels = np.round(scanned).astype(np.int16)
    return as_nifti(voxels if voxels.shape[-1] > 1 else voxels[..., 0], grid.affine), as_nifti(label, grid.affine)


def _draw_grid(manifest: Mapping[str, Any], sides: np.ndarray, rng: np.random.Generator) -> SyntheticGrid:
    """Return a grid around the origin with the voxel sides of a stored case; ``sides`` gives the field of view."""
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
    # Voxels that were removed or never imaged are exactly 0.
    return np.where(clean == 0, 0, np.minimum(unit * scan(clean / unit, positions, rng), np.iinfo(np.int16).max))


Floats = NDArray[np.float64]
Labels = NDArray[np.uint8]


class Structure(NamedTuple):
    """An ellipsoid or a tube of a scene."""

    grey: tuple[float, ...]
    """Intensity in each channel."""
    radii: float | tuple[float, float, float]
    points: int | tuple[tuple[float, float, float], ...]
    """The centre of an ellipsoid, or the path of a tube; or the number of points, drawn in the middle of ``within``; 0
    for the points of the structure before."""
    label: int = 0
    within: str = ""
    """The structure around this one, if any."""


EVERYWHERE = (np.inf, np.inf, np.inf)
LIVER, LUNG, VENTRICLE = (0.35, 0.05, 0.1), (0.32, 0.5, 0.9), (0.06, 0.35, 0.12)
RING = (
    (0.5, 0.15, -0.5),
    (0.52, 0.15, 0.4),
    (0, 0.15, 0.5),
    (-0.52, 0.15, 0.45),
    (-0.5, 0.15, -0.4),
    (-0.1, 0.15, -0.75),
)
DUCT = ((0.22, 0.05, -0.25), (0.08, 0.12, -0.05), (-0.2, 0.08, 0.1), (-0.45, -0.08, 0.22))

TRUNK = {
    "air": Structure((-1000,), EVERYWHERE, ((0, 0, 0),)),
    "fat": Structure((-100,), (0.95, 0.8, np.inf), ((0, 0, 0),)),
    "muscle": Structure((50,), (0.78, 0.64, np.inf), ((0, 0, 0),)),
    "spine": Structure((500,), (0.12, 0.12, np.inf), ((0, -0.5, 0),)),
}
ABDOMEN = {**TRUNK, "inner fat": Structure((-100,), (0.35, 0.2, 0.4), ((-0.2, 0.25, -0.3),))}
SCENES: Mapping[str, Mapping[str, Structure]] = {
    "Task01_BrainTumour": {  # FLAIR, T1, T1 with contrast, T2, without the skull
        "brain": Structure((600, 650, 650, 550), (0.72, 0.86, 0.85), ((0, 0, 0),)),
        "right ventricle": Structure((150, 250, 250, 1500), VENTRICLE, ((0.1, 0, 0.1),)),
        "left ventricle": Structure((150, 250, 250, 1500), VENTRICLE, ((-0.1, 0, 0.1),)),
        "oedema": Structure((1250, 500, 520, 1150), 0.42, 1, label=1, within="brain"),
        "rim": Structure((950, 550, 1500, 850), 0.24, 0, label=3, within="oedema"),
        "core": Structure((800, 350, 400, 1300), 0.12, 0, label=2, within="rim"),
    },
    "Task02_Heart": {  # the left and right border was not imaged
        "chest": Structure((350,), (0.85, np.inf, np.inf), ((0, 0, 0),)),
        "right lung": Structure((80,), LUNG, ((0.42, 0, 0),)),
        "left lung": Structure((80,), LUNG, ((-0.42, 0, 0),)),
        "left ventricle": Structure((1000,), (0.25, 0.3, 0.35), ((-0.25, 0.3, -0.15),)),
        "right ventricle": Structure((1000,), (0.22, 0.25, 0.32), ((0.15, 0.25, -0.1),)),
        "atrium": Structure((1100,), (0.26, 0.26, 0.26), ((-0.1, -0.15, 0.1),), label=1),
        "upper veins": Structure((1100,), 0.08, ((-0.6, -0.3, 0.25), (-0.1, -0.15, 0.1), (0.4, -0.3, 0.25)), label=1),
        "lower veins": Structure((1100,), 0.08, ((-0.6, -0.3, -0.08), (-0.1, -0.15, 0.1), (0.4, -0.3, -0.08)), label=1),
    },
    "Task03_Liver": {
        **ABDOMEN,
        "liver": Structure((108,), (0.38, 0.42, 0.55), (LIVER,), label=1),
        "tumour": Structure((55,), 0.14, 1, label=2, within="liver"),
    },
    "Task05_Prostate": {  # T2, ADC
        "pelvis": Structure((180, 800), EVERYWHERE, ((0, 0, 0),)),
        "bladder": Structure((900, 2600), (0.25, 0.2, 0.3), ((0, 0.35, 0.6),)),
        "peripheral zone": Structure((480, 1700), (0.32, 0.28, 0.75), ((0, 0, 0),), label=1),
        "transition zone": Structure((290, 1250), (0.24, 0.19, 0.65), ((0, 0.08, 0.05),), label=2),
    },
    "Task06_Lung": {
        **TRUNK,
        "right lung": Structure((-850,), LUNG, ((0.42, 0, 0),)),
        "left lung": Structure((-850,), LUNG, ((-0.42, 0, 0),)),
        "tumour": Structure((35,), 0.15, 1, label=1, within="left lung"),
    },
    "Task07_Pancreas": {
        **ABDOMEN,
        "liver": Structure((108,), (0.38, 0.42, 0.55), (LIVER,)),
        "pancreas": Structure((90,), 0.11, DUCT, label=1),
        "tumour": Structure((20,), 0.12, 1, label=2, within="pancreas"),
    },
    "Task08_HepaticVessel": {
        **ABDOMEN,
        "liver": Structure((100,), (0.38, 0.42, 0.55), (LIVER,)),
        "tumour": Structure((45,), 0.14, 1, label=2, within="liver"),
        "vessels": Structure((170,), 0.045, 6, label=1, within="liver"),
    },
    "Task09_Spleen": {
        **ABDOMEN,
        "liver": Structure((108,), (0.38, 0.42, 0.55), (LIVER,)),
        "spleen": Structure((120,), (0.16, 0.28, 0.4), ((-0.5, -0.2, 0.15),), label=1),
    },
    "Task10_Colon": {
        **TRUNK,
        "wall": Structure((35,), 0.14, RING),
        "inside": Structure((-900,), 0.07, 0),
        "cancer": Structure((95,), 0.19, 1, label=1, within="wall"),
    },
}
"""Structures of each task, in the order of painting; the hippocampus is that of `volseg.data.synthetic`, in mm."""


def draw_scene(structures: Mapping[str, Structure], at: Floats, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Return clean intensities ``(C, D, H, W)`` and the label map; sizes and the patient's position vary."""
    held = np.full(at.shape[:3], -1)
    names, points = list(structures), np.zeros((1, 3))
    patient = rng.uniform(-0.05, 0.05, 3)
    for number, structure in enumerate(structures.values()):
        room = held == names.index(structure.within) if structure.within else np.full(held.shape, True)
        if isinstance(structure.points, tuple):
            points = np.array(structure.points) + patient
        elif structure.points:
            inside = at[room]
            middle = np.linalg.norm(inside - inside.mean(0), axis=1).argsort()[: len(inside) // 2 + 1]
            points = inside[rng.choice(middle, structure.points)]
        radii = np.array(structure.radii) * rng.uniform(0.9, 1.1)
        held[room & (measure_depth(at, points, radii) > 0)] = number
    greys = np.array([(0.0,) * len(structures[names[0]].grey), *(structure.grey for structure in structures.values())])
    values = np.array([0, *(structure.label for structure in structures.values())], dtype=np.uint8)
    texture = 1 + 0.08 * np.clip(draw_texture(at.shape[:3], 2, rng), -2, 2)
    return np.moveaxis(greys[held + 1], -1, 0) * texture, values[held + 1]


def measure_depth(at: Floats, points: Floats, radii: Floats) -> Floats:
    """Return each voxel's depth in a tube along straight lines: 1 in its middle, 0 on its surface, less outside."""
    depths = []
    for start, end in pairwise([points[0], *points]):
        along = np.clip((at - start) @ (end - start) / max(((end - start) ** 2).sum(), 1e-12), 0, 1)
        depths.append(1 - np.linalg.norm((at - start - along[..., None] * (end - start)) / radii, axis=-1))
    return np.max(depths, axis=0)
