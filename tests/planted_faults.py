"""Draw a clean data set, and plant faults into its cases.

``python tests/planted_faults.py DATA_SET [ROUNDS]`` copies a data set in MSD's layout, plants every kind of fault into
another case, checks the copy, and prints how often each fault is found and under which names.
"""

import gzip
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import nibabel
import numpy as np
from scipy import ndimage

from volseg.data import TaskCheck, check_task, load_task
from volseg.data.cases import folds

Edit = Callable[[np.ndarray], np.ndarray]

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

    def change(self, field: str, edit: Edit, affine: np.ndarray | None = None) -> None:
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


def change_image(edit: Edit) -> Callable[[Planter], None]:
    """Return what edits the voxels of a case's image."""
    return lambda case: case.change("image", edit)


def change_label(edit: Edit) -> Callable[[Planter], None]:
    """Return what edits the voxels of a case's label."""
    return lambda case: case.change("label", edit)


def moved(*mm: float) -> np.ndarray:
    """Return a shift."""
    affine = np.eye(4)
    affine[:3, 3] = mm
    return affine


def scaled(*factors: float) -> np.ndarray:
    """Return a scaling of the voxels."""
    return np.diag([*factors, 1.0])


def set_voxel(value: float) -> Edit:
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


def _cut_out(case: Planter) -> None:
    """Keep a quarter of the width around the label's middle."""
    label = np.asarray(nibabel.load(case.label).dataobj)
    middle, width = int(np.argwhere(label).mean(0)[0]), label.shape[0] // 8
    for field in ("image", "label"):
        case.change(field, lambda voxels: voxels[middle - width : middle + width])


def _reverse(case: Planter, *fields: str) -> None:
    """Store the left-right axis the other way round; nothing moves in the patient."""
    flip = scaled(-1, 1, 1)
    flip[0, 3] = nibabel.load(case.image).shape[0] - 1
    for field in fields:
        case.change(field, lambda voxels: voxels[::-1].copy(), flip)


def _invert(voxels: np.ndarray) -> np.ndarray:
    return voxels.max() - voxels


def _coarsen(case: Planter) -> None:
    place = scaled(2, 2, 2)
    place[:3, 3] = 0.5
    case.change("label", lambda voxels: voxels[::2, ::2, ::2], place)


def _rng(case: Planter) -> np.random.Generator:
    """Return a generator that is seeded by the case."""
    return np.random.default_rng(sum(case.name.encode()))


def _keep_three_voxels(case: Planter) -> None:
    def edit(voxels: np.ndarray) -> np.ndarray:
        kept = np.zeros_like(voxels)
        middle = np.argwhere(voxels)[len(np.argwhere(voxels)) // 2]
        kept[middle[0], middle[1], middle[2] : middle[2] + 3] = 1
        return kept

    case.change("label", edit)


def _draw_label(case: Planter) -> None:
    case.change("label", lambda voxels: _rng(case).integers(0, 3, voxels.shape).astype(np.uint8))


def _salt_label(case: Planter) -> None:
    case.change("label", lambda voxels: np.where(_rng(case).random(voxels.shape) < 0.03, 1, voxels).astype(np.uint8))


def _add_stray(case: Planter) -> None:
    """Label eight voxels in the corner that is farthest from the label."""

    def edit(voxels: np.ndarray) -> np.ndarray:
        changed, centre = voxels.copy(), np.argwhere(voxels).mean(0)
        corner = [
            slice(-4, -2) if at < side / 2 else slice(2, 4) for at, side in zip(centre, voxels.shape, strict=True)
        ]
        changed[tuple(corner)] = 1
        return changed

    case.change("label", edit)


def shift_label(step: int, axis: int) -> Callable[[Planter], None]:
    """Return what moves the label by some voxels; voxels that leave the volume are lost."""
    steps = step * np.eye(3)[axis]
    return change_label(lambda voxels: ndimage.shift(voxels, steps, order=0))


def flip_label(axis: int) -> Callable[[Planter], None]:
    """Return what mirrors the label's voxels and leaves its header unchanged."""
    return change_label(lambda voxels: np.flip(voxels, axis).copy())


def _draw_image(case: Planter) -> None:
    case.change("image", lambda voxels: _rng(case).normal(voxels.mean(), voxels.std(), voxels.shape).astype(np.float32))


def _add_noise(case: Planter) -> None:
    def edit(voxels: np.ndarray) -> np.ndarray:
        return (voxels + _rng(case).normal(0, voxels.std(), voxels.shape)).astype(np.float32)

    case.change("image", edit)


def _clip_to_bytes(voxels: np.ndarray) -> np.ndarray:
    """Clip at 255; an image that lies below it, at the value that 30 % of the voxels reach, as if it were larger."""
    return voxels.clip(None, np.percentile(voxels, 70)) if voxels.max() <= 255 else voxels.clip(0, 255)


def _overflow(voxels: np.ndarray) -> np.ndarray:
    """Store values in int16 of which a few per cent are larger than 32767."""
    scaled = voxels.astype(np.float64) * (1.5 * 32767 / np.percentile(voxels, 99))
    return scaled.astype(np.int64).astype(np.int16)


def _swap_bytes(voxels: np.ndarray) -> np.ndarray:
    return (voxels.astype(np.float64) * (1000 / voxels.max())).astype(np.int16).byteswap()


def keep_slices(part: Callable[[int], slice]) -> Callable[[Planter], None]:
    """Return what keeps some slices of image and label, and leaves the spacing unchanged."""

    def put(case: Planter) -> None:
        for field in ("image", "label"):
            case.change(field, lambda voxels: voxels[:, :, part(voxels.shape[2])])

    return put


def _blank_half(voxels: np.ndarray) -> np.ndarray:
    changed = voxels.copy()
    changed[:, :, voxels.shape[2] // 2 :] = 0
    return changed


def _unpack(case: Planter) -> None:
    case.image.write_bytes(gzip.decompress(case.image.read_bytes()))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 75632\n"

FAULTS: Mapping[str, tuple[set[str], Callable[[Planter], object]]] = {
    "label deleted": ({"missing-file"}, lambda case: case.label.unlink()),
    "image cut short": ({"truncated"}, lambda case: case.image.write_bytes(case.image.read_bytes()[:-200])),
    "text for an image": ({"unreadable"}, lambda case: case.image.write_bytes(gzip.compress(b"no image " * 100))),
    "metres for mm": ({"size"}, lambda case: case.place(scaled(1e-3, 1e-3, 1e-3))),
    "time series": ({"channels"}, change_image(lambda voxels: np.stack([voxels, voxels[::-1]], -1))),
    "NaN": ({"not-finite"}, change_image(set_voxel(np.nan))),
    "constant": ({"constant"}, change_image(np.zeros_like)),
    "two labels": ({"label-channels"}, change_label(lambda voxels: np.stack([voxels, voxels], -1))),
    "probabilities": ({"label-fractions"}, change_label(set_voxel(0.4))),
    "undeclared": ({"label-undeclared"}, change_label(set_voxel(7))),
    "label for an image": ({"image-is-label"}, lambda case: shutil.copyfile(case.label, case.image)),
    "swapped": ({"swapped"}, _swap),
    "cropped label": ({"shape"}, change_label(lambda voxels: voxels[:-2])),
    "coarse label": ({"label-coarser"}, _coarsen),
    "label displaced": ({"affine"}, lambda case: case.place(moved(0, 3, 0), "label")),
    "empty label": ({"label-empty"}, change_label(np.zeros_like)),
    "qform mirrored": ({"mirrored"}, lambda case: case.turn_qform(scaled(-1, 1, 1))),
    "qform moved": ({"forms-disagree"}, lambda case: case.turn_qform(moved(1.5, 0, 0))),
    "no form": ({"unplaced", "orientation"}, _unplace),
    "other side first": ({"orientation"}, lambda case: _reverse(case, "image", "label")),
    "thick slices": ({"spacing", "extent"}, lambda case: case.place(scaled(1, 1, 6))),
    "cut out": ({"extent"}, _cut_out),
    "one slice": ({"single-slice", "extent"}, keep_slices(lambda count: slice(count // 2, count // 2 + 1))),
    "another scale": ({"intensity-scale"}, change_image(lambda voxels: voxels.astype(np.float32) * 1000)),
    "inverted": ({"contrast"}, change_image(_invert)),
    "image deleted": ({"missing-file"}, lambda case: case.image.unlink()),
    "empty file": ({"truncated", "unreadable"}, lambda case: case.label.write_bytes(b"")),
    "pointer of Git LFS": ({"unreadable"}, lambda case: case.image.write_bytes(POINTER)),
    "plain as .nii.gz": ({"unreadable"}, _unpack),
    "infinite": ({"not-finite"}, change_image(set_voxel(-np.inf))),
    "NaN in the label": ({"not-finite"}, change_label(set_voxel(np.nan))),
    "1e38": ({"huge-values"}, change_image(set_voxel(1e38))),
    "negative label": ({"label-undeclared"}, change_label(set_voxel(-1))),
    "rounded label": ({"label-fractions"}, change_label(lambda voxels: voxels * np.float32(1.0000001))),
    "other axis order": ({"label-reordered"}, lambda case: _reverse(case, "label")),
    "label everywhere": ({"label-full"}, change_label(np.ones_like)),
    "three voxels": ({"label-volume"}, _keep_three_voxels),
    "drawn label": ({"label-ragged"}, _draw_label),
    "salted label": ({"label-ragged", "label-scattered"}, _salt_label),
    "merged labels": ({"label-absent"}, change_label(lambda voxels: (voxels > 0).astype(np.uint8))),
    "stray voxels": ({"label-scattered"}, _add_stray),
    "label 4 to the right": ({"label-shifted"}, shift_label(4, 0)),
    "label 4 to the left": ({"label-shifted"}, shift_label(-4, 0)),
    "label 4 to the back": ({"label-shifted"}, shift_label(-4, 1)),
    "label 4 to the head": ({"label-shifted"}, shift_label(4, 2)),
    "label 12 to the left": ({"label-shifted", "label-cut"}, shift_label(-12, 0)),
    "label 12 to the front": ({"label-shifted", "label-cut"}, shift_label(12, 1)),
    "label mirrored left-right": ({"label-mirrored"}, flip_label(0)),
    "label mirrored front-back": ({"label-mirrored"}, flip_label(1)),
    "label mirrored head-feet": ({"label-mirrored"}, flip_label(2)),
    "drawn image": ({"noise"}, _draw_image),
    "noise": ({"noise"}, _add_noise),
    "clipped to 8 bits": ({"saturated"}, change_image(_clip_to_bytes)),
    "overflow of 16 bits": ({"wrapped", "noise"}, change_image(_overflow)),
    "bytes swapped": ({"noise", "wrapped"}, change_image(_swap_bytes)),
    "first half of the slices": ({"extent", "label-cut"}, keep_slices(lambda count: slice(None, count // 2))),
    "every second slice": ({"extent", "slices-unlike"}, keep_slices(lambda count: slice(None, None, 2))),
    "half of the slices blank": ({"empty-slices"}, change_image(_blank_half)),
    "doubled spacing": ({"spacing"}, lambda case: case.place(scaled(1, 1, 2))),
    "all spacings doubled": ({"spacing"}, lambda case: case.place(scaled(2, 2, 2))),
    "a ten thousandth": ({"intensity-scale"}, change_image(lambda v: v.astype(np.float32) * np.float32(1e-4))),
}
"""By name: the kinds of finding of which a check must report at least one, and what plants the fault."""

COPIES: Mapping[str, Edit] = {
    "copy without a slice": lambda voxels: voxels[:, :, 1:],
    "copy without three rows": lambda voxels: voxels[1:-1, :-1],
    "copy stored reversed": lambda voxels: voxels[::-1].copy(),
    "copy of another scale": lambda voxels: voxels.astype(np.float32) * 3 + 7,
}
"""Changes of the image of a copied case, and of its label unless they change intensities."""


def plant(root: Path, names: list[str], tests: list[str]) -> dict[str, dict[str, set[str]]]:
    """Plant each fault into another case or pair of cases.

    Returns
    -------
    dict
        By fault and case, the kinds of finding of which a check must report at least one.
    """
    free = iter(names)
    expected: dict[str, dict[str, set[str]]] = {}
    for fault, (kinds, put) in FAULTS.items():
        case = Planter(root, next(free))
        put(case)
        expected[fault] = {case.name: kinds}
    left = list(free)

    def take(name: str) -> str:
        left.remove(name)
        return name

    validates = set(folds(names)[0].validation)
    held_out = take(next(name for name in left if name in validates))
    learnt = take(next(name for name in left if name not in validates))
    for folder in ("imagesTr", "labelsTr"):
        shutil.copyfile(root / folder / f"{held_out}.nii.gz", root / folder / f"{learnt}.nii.gz")
    expected["leak"] = {held_out: {"leak"}, learnt: {"leak"}}
    expected["labels exchanged"] = dict.fromkeys(_exchange_labels(root, *map(take, _find_alike(root, left))), EXCHANGED)
    one, other = map(take, _find_alike(root, left))
    copied = np.asarray(nibabel.load(root / "labelsTr" / f"{one}.nii.gz").dataobj)
    Planter(root, other).change("label", lambda voxels: copied)
    expected["same label"] = {min(one, other): {"same-label"}}
    for fault, edit in COPIES.items():
        one, other = take(left[0]), take(left[1])
        _copy_changed(root, one, other, edit, scales="scale" in fault)
        expected[fault] = {other: {"image-copy"}}
    if tests:
        trains = take(left[0])
        shutil.copyfile(root / "imagesTr" / f"{trains}.nii.gz", root / "imagesTs" / f"{tests[0]}.nii.gz")
        expected["trains and tests"] = {trains: {"trains-and-tests"}}
    return expected


EXCHANGED = {"labels-exchanged", "label-shifted"}


def _exchange_labels(root: Path, one: str, other: str) -> tuple[str, str]:
    first, second = (Planter(root, name) for name in (one, other))
    voxels = np.asarray(nibabel.load(first.label).dataobj)
    first.change("label", lambda _: np.asarray(nibabel.load(second.label).dataobj))
    second.change("label", lambda _: voxels)
    return one, other


def _copy_changed(root: Path, one: str, other: str, edit: Edit, *, scales: bool) -> None:
    given, copied = (Planter(root, name) for name in (one, other))
    shutil.copyfile(given.image, copied.image)
    shutil.copyfile(given.label, copied.label)
    for field in ("image",) if scales else ("image", "label"):
        copied.change(field, edit)


def _find_alike(root: Path, names: list[str]) -> tuple[str, str]:
    """Return the first two cases of one shape."""
    shapes = {name: nibabel.load(root / "labelsTr" / f"{name}.nii.gz").shape for name in names}
    return next((one, other) for one, other in combinations(names, 2) if shapes[one] == shapes[other])


def found_in(root: Path) -> tuple[dict[str, set[str]], TaskCheck]:
    """Check a data set; return the kinds of finding by case, and the check."""
    check = check_task(load_task(root, require_files=False))
    found: dict[str, set[str]] = {}
    for finding in check.findings:
        found.setdefault(finding.case, set()).add(finding.kind)
    return found, check


def plant_copy(source: Path, root: Path, seed: int) -> dict[str, dict[str, set[str]]]:
    """Copy a data set in MSD's layout and plant faults into its cases in random order; see `plant`."""
    task = load_task(source)
    for case in task.training:
        for folder, field in (("imagesTr", "image"), ("labelsTr", "label")):
            (root / folder).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(case[field], root / folder / case[field].name)
    names = [case["case"] for case in task.training]
    labels = {str(value): name for value, name in task.labels.items()}
    write_manifest(root, names, [], labels=labels, modality={"0": task.modalities[0]})
    return plant(root, np.random.default_rng(seed).permutation(names).tolist(), [])


def main(source: Path, rounds: int) -> None:
    """Print a row for each kind of fault, and the findings of other cases."""
    named: dict[str, list[bool]] = {}
    kinds: dict[str, Counter[str]] = {}
    others: Counter[str] = Counter()
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            expected = plant_copy(source, Path(folder) / "Task00_Planted", seed)
            found, _ = found_in(Path(folder) / "Task00_Planted")
        for fault, cases in expected.items():
            seen = set().union(*(found.get(name, set()) for name in cases))
            wanted = set().union(*cases.values())
            named.setdefault(fault, []).append(bool(seen & wanted))
            kinds.setdefault(fault, Counter()).update(seen)
        planted = {name for cases in expected.values() for name in cases}
        others.update(f"{name}: {', '.join(sorted(kinds))}" for name, kinds in found.items() if name not in planted)
    for fault, hits in named.items():
        sys.stdout.write(f"{sum(hits)}/{rounds}  {fault:28}{', '.join(kinds[fault])}\n")
    often = sum(sum(hits) >= 0.8 * rounds for hits in named.values())
    sys.stdout.write(
        f"{often} of {len(named)} kinds of fault are found in at least four of five rounds; "
        f"findings of other cases: {dict(others)}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
