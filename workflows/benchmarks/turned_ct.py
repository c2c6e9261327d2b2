"""One CT on other grids: its segmentation is the same in mm, whichever way the voxels are stored.

A small network learns three structures of one CT. Then it predicts that CT as it is, with its voxel axes permuted and
flipped (the patient stays where it is: every voxel must have the same label), and resampled onto grids that are
anisotropic, finer, or oblique. Of these the label map is compared, on its own grid, with that of the CT as it is, whose
probabilities are interpolated there::

    python workflows/benchmarks/turned_ct.py ../shared/data/ct --output unet_cpu_turned_ct.json

Near the border of the CT the network sees other things on another grid: on an oblique one, air beyond it. So voxels
within 9 mm of the border are left out (``everywhere`` counts them). What resampling itself costs is told apart from the
way through the grid: the CT resampled there *and back* goes through the network too (``back``). By default the CT is
smoothed first: trilinear interpolation takes the noise of a CT away, and a network answers to noise.

What the network alone makes of another grid is measured without any interpolation: planes are cut off at one end
(``cut``), so that every voxel is as it was, and its place in the network's strides is another one, unless as many
planes are cut off as its deepest voxel is wide (8).
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation
from torch import Tensor

from volseg.data.preprocessed import prepare
from volseg.data.readers import read_volume
from volseg.evaluation.overlap import evaluate_case
from volseg.experiment import load_config, train
from volseg.experiment.sources import load_trained
from volseg.experiment.trained import Trained
from volseg.inference.original_grid import label_map_on, resample
from volseg.inference.postprocessing import Postprocessing, Step
from volseg.inference.predictor import Predictor
from volseg.inference.writing import write_prediction
from volseg.monitoring.environment import environment
from volseg.transforms.grid import Grid

CONFIG = """
name: ct
data: {root: .}
split: {validation: none}
preprocessing:
  - {name: Orientation, axcodes: RAS}
  - {name: Spacing, spacing: [3, 3, 3]}
  - {name: ClipZScore, lower: -200, upper: 300, mean: 0, std: 100}
patch: {size: [64, 64, 24], batch: 2, foreground: 0.7}
augmentation:
  margin: 0.2
  mirror: {probability: 0}        # left is not right: of one CT that would be two tasks
  rotation: {probability: 0.4, degrees: [10, 10, 20]}
  gamma: {probability: 0}         # HU are HU
  inverted_gamma: {probability: 0}
network: {name: UNet, channels: [8, 16, 32, 64], strides: [2, 2, 2], num_res_units: 1, norm: INSTANCE}
optimizer: {name: AdamW, lr: 3.0e-3}
schedule: {name: cosine, warmup: 0.05}
training: {epochs: 1, iterations: 500, ema: 0.98}
"""

STRUCTURES = {1: ("liver", (5,)), 2: ("back muscles", (86, 87)), 3: ("rest of the trunk", ())}
"""Value, name, and the values in the CT's label file (TotalSegmentator's); the last one is what else is no air."""

SKIN = -300
"""HU above which a voxel is no air."""

MARGIN_MM = 9.0
"""From the border of the CT: three voxels."""

AIR = -1024.0
"""HU of what the CT does not cover."""

RESAMPLED: Mapping[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    "the same voxels, 0.75 mm further along each axis": ((3.0, 3.0, 3.0), (0, 0, 0), 0.75),
    "finer in the plane: 1.5 x 1.5 x 3 mm": ((1.5, 1.5, 3.0), (0, 0, 0), 0.0),
    "finer: 2 x 2 x 2 mm": ((2.0, 2.0, 2.0), (0, 0, 0), 0.0),
    "anisotropic: 1.5 x 1.5 x 5 mm": ((1.5, 1.5, 5.0), (0, 0, 0), 0.0),
    "oblique: 15 degrees in the plane, 1.5 mm": ((1.5, 1.5, 1.5), (0, 0, 15), 0.0),
    "oblique: 5, 5 and 10 degrees, 1.5 mm": ((1.5, 1.5, 1.5), (5, 5, 10), 0.0),
}
"""Spacing (mm), turns about x, y and z (degrees), and shift (mm)."""


CUT = (1, 2, 4, 8)
"""Planes cut off at the beginning of each axis."""


def make_task(folder: Path, ct: Path, smooth_mm: float) -> Path:
    """Write the CT, smoothed by a Gaussian of this standard deviation, and its structures as a task of one case."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    image = nibabel.load(ct / "slab_3mm.nii.gz")
    sigma = smooth_mm / np.array(image.header.get_zooms())
    hu = gaussian_filter(np.asarray(image.dataobj, dtype=np.float32), sigma, mode="nearest")
    nibabel.save(nibabel.Nifti1Image(hu, image.affine), folder / "imagesTr" / "ct.nii.gz")
    label = nibabel.load(ct / "slab_3mm_labels.nii.gz")
    voxels = np.asarray(label.dataobj)
    trunk = Step(operation="keep_largest", values=(3,)), Step(operation="fill_holes", values=(3,))
    order = Postprocessing(labels=(0, 3), structures=((3,),), painted=(3,), steps=trunk)
    kept = order(MetaTensor(3 * torch.from_numpy(hu > SKIN).byte()[None])).numpy()[0]
    for value, (_, theirs) in STRUCTURES.items():
        kept[np.isin(voxels, theirs)] = value
    nibabel.save(nibabel.Nifti1Image(kept, label.affine), folder / "labelsTr" / "ct.nii.gz")
    described = {
        "name": "CT",
        "modality": {"0": "CT"},
        "labels": {"0": "background", **{str(value): name for value, (name, _) in STRUCTURES.items()}},
        "training": [{"image": "./imagesTr/ct.nii.gz", "label": "./labelsTr/ct.nii.gz"}],
        "test": [],
    }
    (folder / "dataset.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def list_orders(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield so many of the 48 ways to permute and flip axes, evenly chosen, without the one that changes nothing."""
    ways = [(order, flips) for order in permutations(range(3)) for flips in product((1, -1), repeat=3)][1:]
    yield from ways[:: max(1, len(ways) // count)][:count]


def reorder(image: nibabel.Nifti1Image, order: Sequence[int], flips: Sequence[int]) -> nibabel.Nifti1Image:
    """Return the image with its voxel axes permuted and flipped; no voxel moves in the patient."""
    return image.as_reoriented(np.stack([order, flips], axis=1))


def place_grid(source: Grid, spacing: Sequence[float], degrees: Sequence[float], shift_mm: float) -> Grid:
    """Return a turned grid about the middle of ``source``, as large as it is, then shifted."""
    turn = torch.from_numpy(Rotation.from_euler("xyz", degrees, degrees=True).as_matrix())
    extent = torch.tensor(source.shape) * source.affine[:3, :3].norm(dim=0)
    shape = tuple(max(1, round(float(side) / step)) for side, step in zip(extent, spacing, strict=True))
    middle = source.affine @ torch.tensor([*((side - 1) / 2 for side in source.shape), 1]).double()
    affine = torch.eye(4, dtype=torch.float64)
    affine[:3, :3] = turn @ torch.diag(torch.tensor(spacing).double())
    affine[:3, 3] = middle[:3] - affine[:3, :3] @ torch.tensor([(side - 1) / 2 for side in shape]).double()
    affine[:3, 3] += shift_mm
    return Grid(shape, affine)  # type: ignore[arg-type]


def bring(target: Grid, voxels: Tensor, source: Grid) -> Tensor:
    """Return HU on another grid, trilinear; air where the CT does not reach."""
    return resample(target, voxels - AIR, source) + AIR


def lie_inside(target: Grid, source: Grid, margin_mm: float) -> Tensor:
    """Return which voxels of a grid lie in the box of another one, so far from its border; ``(D, H, W)``."""
    indices = torch.cartesian_prod(*(torch.arange(side).double() for side in target.shape))
    to_source = target.index_map(source)
    at = indices @ to_source[:3, :3].T + to_source[:3, 3]
    margin = margin_mm / source.affine[:3, :3].norm(dim=0) - 0.5
    far_end = torch.tensor(source.shape) - 1 - margin
    return ((at >= margin) & (at <= far_end)).all(dim=1).reshape(target.shape)


def save(voxels: Tensor, grid: Grid, path: Path) -> Path:
    """Write an image as somebody's file."""
    nibabel.save(nibabel.Nifti1Image(voxels[0].numpy(), grid.affine.numpy()), path)
    return path


def predict(trained: Trained, predictor: Predictor, path: Path) -> Path:
    """Go the whole way, from an image's file to the file of its label map."""
    case = prepare({"case": path.name, "image": path}, trained.preprocessing)
    return write_prediction(predictor(case), case["image"], path.with_name(f"labels_of_{path.name}"))


def compare(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the Dice of each structure."""
    names = {value: name for value, (name, _) in STRUCTURES.items()}
    metrics = evaluate_case(found, expected, names)
    return {name: metrics[value]["Dice"] for value, name in names.items()}


def measure_middles(found: Tensor, expected: Tensor, grid: Grid) -> dict[str, float]:
    """Return how far the middles of each structure's voxels lie apart: an error in geometry would move them all."""
    apart = {}
    for value, (name, _) in STRUCTURES.items():
        middles = [(volume == value).nonzero().double().mean(dim=0) for volume in (found, expected)]
        apart[name] = float((grid.affine[:3, :3] @ (middles[0] - middles[1])).norm())
    return apart


def main() -> None:
    """Train, predict, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ct", type=Path, help="folder with slab_3mm.nii.gz and slab_3mm_labels.nii.gz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--orders", type=int, default=47, help="how many of the 47 other orders of the axes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    parser.add_argument(
        "--smooth", type=float, default=3.0, metavar="MM", help="standard deviation, before anything else; 0: not"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), given.ct, given.orders, given.smooth, given.set)
    given.output.write_text(json.dumps({**result, "environment": environment()}, indent=1) + "\n", encoding="utf-8")


def measure(folder: Path, ct: Path, num_orders: int, smooth_mm: float, overrides: Sequence[str]) -> dict[str, Any]:
    """Return everything but the environment."""
    config = folder / "config.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    root = make_task(folder / "Task01_CT", ct, smooth_mm)
    run = train(load_config(config, [f"data.root={root}", f"output={folder / 'run'}", *overrides])).folder
    trained = load_trained(run)
    predictor = trained.build_predictor()
    plain = folder / "ct.nii.gz"
    nibabel.save(nibabel.load(root / "imagesTr" / "ct.nii.gz"), plain)
    image = read_volume(plain)
    grid, labels = Grid.of(image), nibabel.load(predict(trained, predictor, plain))
    learnt = compare(torch.from_numpy(np.asarray(labels.dataobj)), read_volume(root / "labelsTr" / "ct.nii.gz")[0])
    print("learnt", learnt)

    turned = {}
    for number, (order, flips) in enumerate(list_orders(num_orders)):
        path = folder / f"order_{number}.nii.gz"
        nibabel.save(reorder(nibabel.load(plain), order, flips), path)
        found, expected = nibabel.load(predict(trained, predictor, path)), reorder(labels, order, flips)
        different = int((np.asarray(found.dataobj) != np.asarray(expected.dataobj)).sum())
        apart = float(np.abs(found.affine - expected.affine).max())
        turned[f"axes {list(order)}, flips {list(flips)}"] = {"different_voxels": different, "affines_apart_mm": apart}
    print(
        len(turned), "orders of the axes, voxels that differ:", sum(row["different_voxels"] for row in turned.values())
    )

    rows = {}
    for title, (spacing, degrees, shift) in RESAMPLED.items():
        rows[title] = _measure_resampled(folder, trained, predictor, image, place_grid(grid, spacing, degrees, shift))
        print(title, {key: round(value, 4) for key, value in rows[title]["dice"].items()}, rows[title])
    return {
        "config": CONFIG,
        "overrides": list(overrides),
        "smooth_mm": smooth_mm,
        "learnt": learnt,
        "turned": turned,
        "resampled": rows,
        "cut": {str(planes): _measure_cut(folder, trained, predictor, image, planes) for planes in CUT},
    }


def _measure_cut(
    folder: Path, trained: Trained, predictor: Predictor, image: MetaTensor, planes: int
) -> dict[str, float]:
    """Return the Dice of the CT without its first planes with the CT's, away from the border."""
    grid = Grid.of(image)
    left = grid.crop((planes,) * 3, [side - planes for side in grid.shape])
    voxels = image.as_tensor()[:, planes:, planes:, planes:]
    found = read_volume(predict(trained, predictor, save(voxels, left, folder / "cut.nii.gz")))[0]
    expected = read_volume(folder / "labels_of_ct.nii.gz")[0][planes:, planes:, planes:]
    inside = lie_inside(left, left, MARGIN_MM)
    dice = compare(found * inside, expected * inside)
    print(f"{planes} plane(s) cut off", dice)
    return dice


def _measure_resampled(
    folder: Path, trained: Trained, predictor: Predictor, image: MetaTensor, target: Grid
) -> dict[str, Any]:
    source = Grid.of(image)
    there = bring(target, image.as_tensor(), source)
    found = read_volume(predict(trained, predictor, save(there, target, folder / "there.nii.gz")))[0]

    case = prepare({"case": "ct", "image": folder / "ct.nii.gz"}, trained.preprocessing)
    seen = Grid.of(case["image"])
    probabilities = predictor.probabilities(case["image"].as_tensor()[None])[0]
    expected = label_map_on(target, probabilities, seen)[0].cpu()

    back = save(bring(source, there, target), source, folder / "back.nii.gz")
    way_back = read_volume(predict(trained, predictor, back))[0]
    plain = read_volume(folder / "labels_of_ct.nii.gz")[0]
    inside, inside_back = lie_inside(target, source, MARGIN_MM), lie_inside(source, source, MARGIN_MM)
    inside_back &= lie_inside(source, target, MARGIN_MM)
    return {
        "dice": compare(found * inside, expected * inside),
        "everywhere": compare(found, expected),
        "middles_apart_mm": measure_middles(found * inside, expected * inside, target),
        "back": compare(way_back * inside_back, plain * inside_back),
        "shape": list(target.shape),
    }


if __name__ == "__main__":
    main()
