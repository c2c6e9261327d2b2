"""Synthetic mocks of the Decathlon's tasks: their channels, labels, units and grids, with fewer voxels.

A mock tries a config in seconds, instead of the task's gigabytes and hours. From the task's manifest come channels,
labels, the spacing of the stored cases and its variation, and the proportions of the field of view. Two properties are
guesses: the orientation of the files (known only for Task04: RAS), and the variation of spacings if the manifest has no
range.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from volseg.config.catalogue import get_public_task
from volseg.data.phantoms import SCENES
from volseg.data.synthetic import SyntheticGrid, as_nifti, draw_hippocampus, scan, write_task
from volseg.errors import DataError

__all__ = ["make_mock_task"]

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
