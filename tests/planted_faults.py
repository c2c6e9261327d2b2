"""A clean data set, and faults to plant into copies of its cases."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import nibabel
import numpy as np

from volseg.data.splits import folds

SHAPE = (26, 30, 22)
LABELS = {"0": "background", "1": "Anterior", "2": "Posterior"}


def write_manifest(root: Path, names: list[str], tests: list[str], **changes: object) -> Path:
    """Write the ``dataset.json`` of a folder in MSD's layout."""
    declared = {
        "name": "Planted",
        "modality": {"0": "MRI"},
        "labels": LABELS,
        "training": [{"image": f"imagesTr/{name}.nii.gz", "label": f"labelsTr/{name}.nii.gz"} for name in names],
        "test": [f"imagesTs/{name}.nii.gz" for name in tests],
    }
    (root / "dataset.json").write_text(json.dumps(declared | changes), encoding="utf-8")
    return root


def save(path: Path, voxels: np.ndarray, affine: np.ndarray, qform: np.ndarray | None = None) -> None:
    """Write a NIfTI file with both forms."""
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code=1)
    image.set_qform(affine if qform is None else qform, code=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)


def draw_task(root: Path, num_cases: int = 40, num_test: int = 2, **changes: object) -> Path:
    """Write cases that are alike: a bright body of two parts in grey tissue, air around; 1 mm, RAS."""
    names = [f"case_{number:02d}" for number in range(num_cases + num_test)]
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        place = np.indices(SHAPE) - (np.array(SHAPE) / 2 + rng.uniform(-3, 3, 3))[:, None, None, None]
        inside = np.sqrt((place**2).sum(0)) < rng.uniform(4, 6)
        label = np.where(inside, np.where(place[1] > 0, 1, 2), 0).astype(np.uint8)
        image = 100 + 60 * inside + 40 * (label == 1) + rng.normal(0, 4, SHAPE)
        for dim in range(3):
            np.moveaxis(image, dim, 0)[[0, 1, 2, -3, -2, -1]] = 0
        affine = np.eye(4)
        affine[:3, 3] = rng.uniform(-20, 20, 3)
        trains = number < num_cases
        save(root / ("imagesTr" if trains else "imagesTs") / f"{name}.nii.gz", image.astype(np.int16), affine)
        if trains:
            save(root / "labelsTr" / f"{name}.nii.gz", label, affine)
    return write_manifest(root, names[:num_cases], names[num_cases:], **changes)


class Planter:
    """Changes the files of one case."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.image, self.label = (root / folder / f"{name}.nii.gz" for folder in ("imagesTr", "labelsTr"))

    def change(self, field: str, edit: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None) -> None:
        """Write one of the files again, with other voxels or another affine."""
        path = getattr(self, field)
        stored = nibabel.load(path)
        place = stored.affine if affine is None else stored.affine @ affine
        save(path, edit(np.asarray(stored.dataobj)), place)

    def place(self, affine: np.ndarray, *fields: str) -> None:
        """Multiply the affine of some files."""
        for field in fields or ("image", "label"):
            self.change(field, lambda voxels: voxels, affine)

    def turn_qform(self, affine: np.ndarray) -> None:
        """Give image and label another qform than sform."""
        for path in (self.image, self.label):
            stored = nibabel.load(path)
            save(path, np.asarray(stored.dataobj), stored.affine, stored.affine @ affine)


def moved(*mm: float) -> np.ndarray:
    """Return a shift."""
    affine = np.eye(4)
    affine[:3, 3] = mm
    return affine


def scaled(*factors: float) -> np.ndarray:
    """Return a scaling of the voxels."""
    return np.diag([*factors, 1.0])


def set_voxel(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return what sets one voxel, in float."""

    def edit(voxels: np.ndarray) -> np.ndarray:
        changed = voxels.astype(np.float32)
        changed[5, 6, 7] = value
        return changed

    return edit


def _swap(case: Planter) -> None:
    other = case.image.with_name("other")
    case.image.rename(other)
    case.label.rename(case.image)
    other.rename(case.label)


def _unplace(case: Planter) -> None:
    for path in (case.image, case.label):
        stored = nibabel.load(path)
        image = nibabel.Nifti1Image(np.asarray(stored.dataobj), None)
        image.header.set_zooms((1, 1, 1))
        image.set_sform(None, code=0)
        image.set_qform(None, code=0)
        nibabel.save(image, path)


def _cut_to_slice(case: Planter) -> None:
    middle = nibabel.load(case.label).shape[2] // 2
    for field in ("image", "label"):
        case.change(field, lambda voxels: voxels[:, :, middle : middle + 1])


def _cut_out(case: Planter) -> None:
    """Keep a quarter of the width around the label's middle."""
    label = np.asarray(nibabel.load(case.label).dataobj)
    middle, width = int(np.argwhere(label).mean(0)[0]), label.shape[0] // 8
    for field in ("image", "label"):
        case.change(field, lambda voxels: voxels[middle - width : middle + width])


def _mirror(case: Planter) -> None:
    """Store the left-right axis the other way round; nothing moves in the patient."""
    sides = nibabel.load(case.image).shape[0]
    flip = scaled(-1, 1, 1)
    flip[0, 3] = sides - 1
    for field in ("image", "label"):
        case.change(field, lambda voxels: voxels[::-1].copy(), flip)


def _invert(voxels: np.ndarray) -> np.ndarray:
    return voxels.max() - voxels


def _coarsen(case: Planter) -> None:
    place = scaled(2, 2, 2)
    place[:3, 3] = 0.5
    case.change("label", lambda voxels: voxels[::2, ::2, ::2], place)


FAULTS: Mapping[str, tuple[set[str], Callable[[Planter], object]]] = {
    "label deleted": ({"missing-file"}, lambda case: case.label.unlink()),
    "image cut short": ({"truncated"}, lambda case: case.image.write_bytes(case.image.read_bytes()[:-200])),
    "text for an image": ({"unreadable"}, lambda case: case.image.write_bytes(gzip.compress(b"no image " * 100))),
    "metres for mm": ({"size"}, lambda case: case.place(scaled(1e-3, 1e-3, 1e-3))),
    "time series": (
        {"channels"},
        lambda case: case.change("image", lambda voxels: np.stack([voxels, voxels[::-1]], -1)),
    ),
    "NaN": ({"not-finite"}, lambda case: case.change("image", set_voxel(np.nan))),
    "constant": ({"constant"}, lambda case: case.change("image", np.zeros_like)),
    "two labels": (
        {"label-channels"},
        lambda case: case.change("label", lambda voxels: np.stack([voxels, voxels], -1)),
    ),
    "probabilities": ({"label-fractions"}, lambda case: case.change("label", set_voxel(0.4))),
    "undeclared": ({"label-undeclared"}, lambda case: case.change("label", set_voxel(7))),
    "label for an image": ({"image-is-label"}, lambda case: shutil.copyfile(case.label, case.image)),
    "swapped": ({"swapped"}, _swap),
    "cropped label": ({"shape"}, lambda case: case.change("label", lambda voxels: voxels[:-2])),
    "coarse label": ({"label-coarser"}, _coarsen),
    "label displaced": ({"affine"}, lambda case: case.place(moved(0, 3, 0), "label")),
    "empty label": ({"label-empty"}, lambda case: case.change("label", np.zeros_like)),
    "qform mirrored": ({"mirrored"}, lambda case: case.turn_qform(scaled(-1, 1, 1))),
    "qform moved": ({"forms-disagree"}, lambda case: case.turn_qform(moved(1.5, 0, 0))),
    "no form": ({"unplaced", "orientation"}, _unplace),
    "other side first": ({"orientation"}, _mirror),
    "thick slices": ({"spacing", "extent"}, lambda case: case.place(scaled(1, 1, 6))),
    "cut out": ({"extent"}, _cut_out),
    "one slice": ({"single-slice", "extent"}, _cut_to_slice),
    "another scale": (
        {"intensity-scale"},
        lambda case: case.change("image", lambda voxels: voxels.astype(np.float32) * 1000),
    ),
    "inverted": ({"contrast"}, lambda case: case.change("image", _invert)),
}
"""What is planted, the kinds of finding by which it must be named, and how."""


def plant(root: Path, names: list[str], tests: list[str]) -> dict[str, set[str]]:
    """Plant every fault into a case of its own, and faults of pairs of cases; return each case's kinds."""
    expected = {}
    free = iter(names)
    for kinds, put in FAULTS.values():
        case = Planter(root, next(free))
        put(case)
        expected[case.name] = kinds
    left = list(free)
    validates = set(folds(names)[0].validation)
    held_out = next(name for name in left if name in validates)
    learnt = next(name for name in left if name not in validates)
    left = [name for name in left if name not in (held_out, learnt)]
    for folder in ("imagesTr", "labelsTr"):
        shutil.copyfile(root / folder / f"{held_out}.nii.gz", root / folder / f"{learnt}.nii.gz")
    one, other = _find_alike(root, left)
    copied = np.asarray(nibabel.load(root / "labelsTr" / f"{one}.nii.gz").dataobj)
    Planter(root, other).change("label", lambda voxels: copied)
    expected |= {held_out: {"leak"}, learnt: {"leak"}, one: {"same-label"}}
    if tests:
        trains = next(name for name in left if name not in (one, other))
        shutil.copyfile(root / "imagesTr" / f"{trains}.nii.gz", root / "imagesTs" / f"{tests[0]}.nii.gz")
        expected[trains] = {"trains-and-tests"}
    return expected


def _find_alike(root: Path, names: list[str]) -> tuple[str, str]:
    """Return the first two cases of one shape."""
    shapes = {name: nibabel.load(root / "labelsTr" / f"{name}.nii.gz").shape for name in names}
    return next((one, other) for one, other in combinations(names, 2) if shapes[one] == shapes[other])
