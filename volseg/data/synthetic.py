"""Write a synthetic data set, which needs no download: two touching structures in noisy, tilted volumes.

The anatomy is drawn in the patient's millimetres and then sampled on a grid, so that spacing, orientation and tilt
change the voxels but never the anatomy. It follows the hippocampus of MSD Task04: a bent tube, thick in front
(``Anterior``) and thin behind (``Posterior``), of one grey value, next to a dark ventricle and other grey matter. The
border between the two labels shows only in the shape and in a faint change of intensity.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from volseg.data.json_files import read_json
from volseg.errors import DataError
from volseg.files import replacing

ORIGIN = "volseg.data.synthetic"
FOLDERS = ("imagesTr", "labelsTr", "imagesTs")
ORIENTATIONS = [(order, signs) for order in permutations(range(3)) for signs in product((1, -1), repeat=3)]
"""The 48 ways to lay voxel axes along the patient's."""

NUM_POINTS = 32
"""Points of the curve in the middle of a tube; they are closer to each other than voxels."""


@dataclass(frozen=True, slots=True)
class SyntheticGrid:
    """A box of voxels and the map from their indices to RAS+ mm."""

    shape: tuple[int, int, int]
    affine: np.ndarray

    def positions(self) -> np.ndarray:
        """Return the position of each voxel's centre, ``(D, H, W, 3)``."""
        indices = np.moveaxis(np.indices(self.shape, dtype=np.float64), 0, -1)
        return indices @ self.affine[:3, :3].T + self.affine[:3, 3]


def make_task(root: str | Path, *, num_cases: int = 24, num_test: int = 4, seed: int = 0) -> Path:
    """Write a task folder in MSD layout; the same arguments write the same bytes.

    Parameters
    ----------
    root
        A folder that is new, empty, or an earlier output of this function, which is then replaced.
    num_cases, num_test
        Cases with and without labels. Case ``n`` depends only on ``seed`` and ``n``.

    Returns
    -------
    Path
        ``root``.

    Raises
    ------
    DataError
        If ``root`` has other content, or a count is out of range.
    """
    described = {
        "name": "Synthetic",
        "description": "Two touching structures, drawn by a program",
        "tensorImageSize": "3D",
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "Anterior", "2": "Posterior"},
    }
    return write_task(root, described, _draw_case, num_cases=num_cases, num_test=num_test, seed=seed)


def write_task(
    root: str | Path,
    described: Mapping[str, Any],
    draw_case: Callable[[np.random.Generator], tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]],
    *,
    num_cases: int,
    num_test: int,
    seed: int,
) -> Path:
    """Write a task folder in MSD layout; see `make_task`.

    Parameters
    ----------
    root, num_cases, num_test, seed
        As for `make_task`.
    described
        Values for ``dataset.json``: ``name``, ``description``, ``tensorImageSize``, ``modality``, ``labels``.
    draw_case
        Returns image and label map of a case.
    """
    root = Path(root)
    if num_cases < 2 or num_test < 0:
        raise DataError(f"needed: num_cases >= 2 and num_test >= 0, got {num_cases=}, {num_test=}")
    _clear(root)
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    names = [f"synthetic_{number:03d}" for number in range(1, num_cases + num_test + 1)]
    # The manifest is written first: after an interruption it marks the folder as an output of this function.
    _write_manifest(root, described, names[:num_cases], names[num_cases:])
    for number, name in enumerate(names):
        image, label = draw_case(np.random.default_rng([seed, number]))
        if number < num_cases:
            nibabel.save(image, root / "imagesTr" / f"{name}.nii.gz")
            nibabel.save(label, root / "labelsTr" / f"{name}.nii.gz")
        else:
            nibabel.save(image, root / "imagesTs" / f"{name}.nii.gz")
    return root


def _clear(root: Path) -> None:
    """Remove an earlier output of this module, and nothing else."""
    if root.exists() and not root.is_dir():
        raise DataError(f"{root} is a file; name a new or an empty folder")
    if not root.exists() or not any(root.iterdir()):
        return
    manifest = root / "dataset.json"
    try:
        ours = read_json(manifest).get("reference") == ORIGIN
    except (DataError, AttributeError):
        ours = False
    if not ours:
        raise DataError(f"{root} is not empty, and volseg did not write it; name a new or an empty folder")
    for folder in FOLDERS:
        for path in (root / folder).glob("synthetic_*.nii.gz"):
            path.unlink()


def _write_manifest(root: Path, described: Mapping[str, Any], training: list[str], test: list[str]) -> None:
    manifest = {
        "name": described["name"],
        "description": described["description"],
        "reference": ORIGIN,
        "licence": "CC0-1.0",
        **{key: described[key] for key in ("tensorImageSize", "modality", "labels")},
        "numTraining": len(training),
        "numTest": len(test),
        "training": [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in training],
        "test": [f"./imagesTs/{name}.nii.gz" for name in test],
    }
    with replacing(root / "dataset.json") as partial:
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _draw_case(rng: np.random.Generator) -> tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]:
    """Draw one patient: anatomy, then the scanner's grid, then the scanner's artefacts."""
    grid = _draw_grid(rng)
    positions = grid.positions()
    clean, label = draw_hippocampus(positions, rng)
    image = scan(clean, positions, rng)
    return as_nifti(_digitise(image, rng), grid.affine), as_nifti(label, grid.affine)


def _draw_grid(rng: np.random.Generator) -> SyntheticGrid:
    """Return a grid of 32 to 48 voxels a side around the origin, in any orientation; half of them are oblique."""
    spacing = rng.uniform(0.9, 1.2, size=3)
    order, signs = ORIENTATIONS[rng.integers(len(ORIENTATIONS))]
    extent = np.array([38.0, 46.0, 38.0])[list(order)]  # mm, along the voxel axes
    shape = np.clip(np.round(extent / spacing), 32, 48).astype(int)
    axes = np.zeros((3, 3))
    axes[list(order), range(3)] = signs
    if rng.random() < 0.5:
        axes = Rotation.from_euler("xyz", rng.uniform(-12, 12, size=3), degrees=True).as_matrix() @ axes
    affine = np.eye(4)
    affine[:3, :3] = axes * spacing
    affine[:3, 3] = -affine[:3, :3] @ ((shape - 1) / 2) + rng.uniform(-1.5, 1.5, size=3)
    return SyntheticGrid((int(shape[0]), int(shape[1]), int(shape[2])), affine)


def draw_hippocampus(positions: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return noise-free intensities, about 0 to 1, and the label map."""
    along = np.linspace(0.0, 1.0, NUM_POINTS)  # from the head in front to the tail behind
    side = rng.choice((-1.0, 1.0))  # left or right hippocampus
    length, bend, rise = rng.uniform(24, 29), rng.uniform(3, 6) * side, rng.uniform(2, 6)
    curve = np.stack([bend * (2 * along - 1) ** 2 - bend / 2, length * (0.5 - along), rise * (along - 0.5)], axis=1)
    head, tail = rng.uniform(5.5, 7.0), rng.uniform(3.2, 4.2)
    neck = rng.uniform(0.36, 0.46)  # where the tube narrows, and the labels meet just behind
    radius = tail + (head - tail) / (1 + np.exp((along - neck) / 0.05))
    depth, nearest = _measure_depth(positions, curve, radius)
    front = along[nearest] < neck + 0.05
    label = np.where(depth > 0, np.where(front, 1, 2), 0).astype(np.uint8)

    white = 0.75 + 0.04 * draw_texture(positions.shape[:3], 3.0, rng)
    ventricle, _ = _measure_depth(
        positions, curve + np.array([0.9 * head * side, 2.0, 5.0]), np.full(NUM_POINTS, rng.uniform(1.5, 2.5))
    )
    cortex, _ = _measure_depth(
        positions, curve + np.array([0.0, -3.0, -13.0]), np.full(NUM_POINTS, rng.uniform(2.0, 3.0))
    )
    image = white
    for inside, value in ((cortex, 0.5), (ventricle, 0.12), (depth, np.where(front, 0.52, 0.44))):
        share = 1 / (1 + np.exp(-inside / 0.35))  # partial volume over about one voxel
        image = share * value + (1 - share) * image
    return image, label


def _measure_depth(positions: np.ndarray, curve: np.ndarray, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each voxel's depth in a tube (mm, negative outside), and the nearest point of the curve."""
    squares = (positions**2).sum(axis=-1)[..., None] - 2 * positions @ curve.T + (curve**2).sum(axis=-1)
    inside = radius - np.sqrt(np.maximum(squares, 0))
    nearest = inside.argmax(axis=-1)
    return np.take_along_axis(inside, nearest[..., None], axis=-1)[..., 0], nearest


def draw_texture(shape: tuple[int, ...], width: float, rng: np.random.Generator) -> np.ndarray:
    """Return smooth noise of unit variance; ``width`` is in voxels."""
    smooth = gaussian_filter(rng.standard_normal(shape), width)
    return smooth / smooth.std()


def scan(clean: np.ndarray, positions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add a bias field and Rician noise, as a receiver coil and a magnitude image do."""
    x, y, z = np.moveaxis(positions, -1, 0) / 20.0
    terms: Iterator[np.ndarray] = iter((x, y, z, x * y, y * z, x * z, x * x, y * y, z * z))
    bias = np.exp(sum(rng.normal(0, 0.06) * term for term in terms))
    noise = rng.uniform(0.02, 0.05)
    real, imaginary = rng.normal(0, noise, size=(2, *clean.shape))
    return np.hypot(clean * bias + real, imaginary)


def _digitise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Store as uint8, int16 or float32, at scales that differ by orders of magnitude between cases."""
    kind = rng.integers(3)
    if kind == 0:
        return np.round(image / image.max() * 255).astype(np.uint8)
    scale = 10 ** rng.uniform(2, 4)
    return np.round(image * scale).astype(np.int16) if kind == 1 else (image * scale).astype(np.float32)


def as_nifti(voxels: np.ndarray, affine: np.ndarray) -> nibabel.Nifti1Image:
    """Return voxels and their place (mm) as an image with equal sform and qform."""
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code="scanner")
    image.set_qform(affine, code="scanner")
    return image
