"""Compare our scores with those of independent implementations; write JSON, and the tests' fixtures.

    pip install --target SITE --no-deps surface-distance medpy panoptica scikit-image connected-components-3d pandas \
        lazy-loader ruamel.yaml plotly narwhals
    python tests/oracles/scores_compared.py --site SITE --labels Task04_Hippocampus/labelsTr CT_LABELS.nii.gz

It compares random shapes at random spacings, and real label maps with themselves moved, grown or shrunk, or with those
of another case. ``surface-distance`` (DeepMind) judged the Decathlon, and has our definition. ``mesh`` measures between
triangles of marching cubes, exactly, as MeshMetrics (arXiv:2509.05670) does.
"""

import argparse
import base64
import json
import sys
import time
import types
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import nibabel
import numpy as np
import scipy.ndimage
import torch
from monai.metrics import DiceMetric, HausdorffDistanceMetric, SurfaceDiceMetric
from scipy.spatial import KDTree

from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import MINIMUM_OVERLAP, match_lesions
from volseg.evaluation.surfaces import measure_surfaces

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "evaluation" / "scores_reference.json"
SPACINGS = [(1, 1, 1), (0.7, 0.7, 0.7), (1, 1, 3), (0.625, 0.625, 3.6), (5, 0.8, 0.8), (0.24, 1.25, 1.25), (2, 1.5, 1)]


def draw_shapes(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw two structures that resemble each other, some of many pieces, some on the border of the volume."""
    shape = rng.integers(5, side, 3)
    smooth = scipy.ndimage.gaussian_filter(rng.normal(size=shape), rng.uniform(0.5, 2.5))
    rough = scipy.ndimage.gaussian_filter(rng.normal(size=shape), rng.uniform(0.3, 1.5))
    mixed = smooth / smooth.std() + rng.uniform(0.05, 1) * rough / rough.std()
    return mixed > rng.uniform(0.2, 1.5), smooth / smooth.std() > rng.uniform(0.2, 1.5)


def list_pairs(
    labels: list[Path], num_random: int, step: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray, tuple[float, ...]]]:
    """Yield kind, prediction, reference and spacing."""
    rng = np.random.default_rng(2026)
    for number in range(num_random):
        prediction, reference = draw_shapes(rng, 14 if number % 2 else 40)
        if prediction.any() and reference.any():
            yield "random", prediction, reference, tuple(map(float, SPACINGS[number % len(SPACINGS)]))
    files = [file for path in labels for file in (sorted(path.glob("*.nii.gz")) if path.is_dir() else [path])]
    before = None
    for number, file in enumerate(files[::step]):
        image = nibabel.load(file)
        values, spacing = np.asarray(image.dataobj), tuple(map(float, image.header.get_zooms()[:3]))
        for value in np.unique(values)[1:]:
            mask = values == value
            ball = scipy.ndimage.generate_binary_structure(3, 1 + number % 3)
            yield "real, moved", np.roll(mask, rng.integers(-2, 3, 3), (0, 1, 2)), mask, spacing
            changed = (
                scipy.ndimage.binary_dilation(mask, ball) if number % 2 else scipy.ndimage.binary_erosion(mask, ball)
            )
            if changed.any():
                yield "real, grown or shrunk", changed, mask, (spacing[0], spacing[1], 3 * spacing[2])
            if before is not None:
                common = tuple(slice(0, min(sides)) for sides in zip(before.shape, mask.shape, strict=True))
                if before[common].any() and mask[common].any():
                    yield "real, another case", before[common], mask[common], spacing
            before = mask


def measure_by_deepmind(prediction, reference, spacing, tolerance) -> dict[str, float]:
    """Return the scores of DeepMind's package."""
    import surface_distance  # of --site

    measured = surface_distance.compute_surface_distances(reference, prediction, spacing)
    areas = measured["surfel_areas_gt"], measured["surfel_areas_pred"]
    distances = measured["distances_gt_to_pred"], measured["distances_pred_to_gt"]
    return {
        "HD95": surface_distance.compute_robust_hausdorff(measured, 95),
        "HD": surface_distance.compute_robust_hausdorff(measured, 100),
        # The package gives the two directed means; over both surfaces together:
        "ASSD": sum(d @ a for d, a in zip(distances, areas, strict=True)) / sum(a.sum() for a in areas),
        "NSD": surface_distance.compute_surface_dice_at_tolerance(measured, tolerance),
        "Dice": surface_distance.compute_dice_coefficient(reference, prediction),
    }


def measure_by_monai(prediction, reference, spacing, tolerance) -> dict[str, float]:
    """Return MONAI's scores; its HD95 is of voxels on the border, each counted as one."""
    volumes = [torch.from_numpy(mask)[None, None].float() for mask in (prediction, reference)]
    surface = SurfaceDiceMetric([tolerance], include_background=True, use_subvoxels=True)
    hausdorff = HausdorffDistanceMetric(include_background=True, percentile=95)
    return {
        "NSD": surface(*volumes, spacing=spacing).item(),
        "HD95": hausdorff(*volumes, spacing=spacing).item(),
        "Dice": DiceMetric()(*volumes).item(),
    }


def measure_by_medpy(prediction, reference, spacing) -> dict[str, float]:
    """Return MedPy's scores, of voxels on the border; its HD95 is one percentile of both directions together."""
    from medpy.metric import binary  # of --site

    return {
        "HD95": binary.hd95(prediction, reference, spacing),
        "HD": binary.hd(prediction, reference, spacing),
        "ASSD": binary.assd(prediction, reference, spacing),
        "Dice": binary.dc(prediction, reference),
    }


def measure_mesh(mask, spacing) -> tuple[np.ndarray, np.ndarray]:
    """Return the triangles ``(N, 3, 3)`` of a structure's surface in mm, and their areas."""
    from skimage.measure import marching_cubes  # of --site

    vertices, faces, _, _ = marching_cubes(np.pad(mask, 1).astype(np.float32), 0.5, spacing=spacing, method="lorensen")
    triangles = vertices[faces].astype(np.float64)
    areas = np.linalg.norm(np.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]), axis=1) / 2
    return triangles[areas > 0], areas[areas > 0]


def find_closest(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return the squared distance of each point ``(N, 3)`` to the triangle ``(N, 3, 3)`` in its row.

    References
    ----------
    .. [1] Ericson, Real-Time Collision Detection (2005), section 5.1.5.
    """
    a, b, c = triangles[:, 0], triangles[:, 1], triangles[:, 2]
    best = np.full(len(points), np.inf)
    for start, end in ((a, b), (b, c), (c, a)):
        edge = end - start
        along = np.clip(((points - start) * edge).sum(1) / np.maximum((edge * edge).sum(1), 1e-30), 0, 1)
        best = np.minimum(best, ((points - start - along[:, None] * edge) ** 2).sum(1))
    normal = np.cross(b - a, c - a)
    length = np.maximum((normal * normal).sum(1), 1e-30)
    foot = points - (((points - a) * normal).sum(1) / length)[:, None] * normal
    is_inside = np.ones(len(points), dtype=bool)
    for start, end in ((a, b), (b, c), (c, a)):
        is_inside &= (np.cross(end - start, foot - start) * normal).sum(1) >= 0
    return np.where(is_inside, np.minimum(best, ((points - foot) ** 2).sum(1)), best)


def measure_to_triangles(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Return the exact distance of each point to a mesh: triangles are tried until none nearer can be left."""
    centres = triangles.mean(1)
    reach = np.linalg.norm(triangles - centres[:, None], axis=2).max()
    tree, distances = KDTree(centres), np.full(len(points), np.inf)
    left, seen, tried = np.arange(len(points)), 0, min(8, len(centres))
    while len(left):
        away, nearest = (each.reshape(len(left), tried)[:, seen:] for each in tree.query(points[left], k=tried))
        rows, columns = np.nonzero(away - reach < distances[left][:, None])
        found = np.sqrt(find_closest(points[left[rows]], triangles[nearest[rows, columns]]))
        np.minimum.at(distances, left[rows], found)
        left = left[(away[:, -1] - reach < distances[left]) & (tried < len(centres))]
        seen, tried = tried, min(tried * 2, len(centres))
    return distances


def measure_by_mesh(prediction, reference, spacing, tolerance) -> dict[str, float]:
    """Return scores between triangles of marching cubes: from the centre of each, by its area, to the other mesh."""
    (mine, my_areas), (theirs, their_areas) = (measure_mesh(mask, spacing) for mask in (prediction, reference))
    to_theirs, to_mine = measure_to_triangles(mine.mean(1), theirs), measure_to_triangles(theirs.mean(1), mine)
    pairs = ((to_theirs, my_areas), (to_mine, their_areas))
    total = my_areas.sum() + their_areas.sum()

    def find_percentile(distances, areas):
        order = np.argsort(distances)
        share = np.cumsum(areas[order]) / areas.sum()
        return float(distances[order][min(np.searchsorted(share, 0.95), len(order) - 1)])

    return {
        "HD95": max(find_percentile(*pair) for pair in pairs),
        "HD": float(max(distances.max() for distances, _ in pairs)),
        "ASSD": float(sum(distances @ areas for distances, areas in pairs) / total),
        "NSD": float(sum(areas[distances <= tolerance].sum() for distances, areas in pairs) / total),
    }


def count_by_panoptica(evaluator, prediction, reference) -> tuple[int, int, int]:
    """Return lesions found, falsely found and missed."""
    result = evaluator.evaluate(prediction.astype(np.uint8), reference.astype(np.uint8), verbose=False)["ungrouped"]
    return int(result.tp), int(result.fp), int(result.fn)


def prepare_packages(site: Path) -> None:
    """Make the packages importable; two of them ask NumPy and SciPy for names that these have dropped."""
    sys.path.append(str(site))
    setattr(np, "Inf", np.inf)  # noqa: B010
    scipy.ndimage.filters = types.SimpleNamespace(correlate=scipy.ndimage.correlate)
    scipy.ndimage.morphology = types.SimpleNamespace(distance_transform_edt=scipy.ndimage.distance_transform_edt)


def pack(mask: np.ndarray) -> str:
    """Return a mask as text."""
    return base64.b64encode(np.packbits(mask).tobytes()).decode()


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="where the packages were installed")
    parser.add_argument("--labels", type=Path, nargs="*", default=[], help="label maps, or folders of them")
    parser.add_argument("--random", type=int, default=200, help="number of random pairs")
    parser.add_argument("--step", type=int, default=1, help="of the label maps, every so manieth")
    parser.add_argument("--output", type=Path, default=ROOT / "workflows/benchmarks/results/scores_cpu_compared.json")
    given = parser.parse_args()
    prepare_packages(given.site)
    import panoptica  # of --site

    evaluator = panoptica.Panoptica_Evaluator(
        expected_input=panoptica.InputType.SEMANTIC,
        instance_approximator=panoptica.ConnectedComponentsInstanceApproximator(),
        instance_matcher=panoptica.NaiveThresholdMatching(matching_threshold=MINIMUM_OVERLAP),
        instance_metrics=[panoptica.Metric.IOU],
        global_metrics=[],
    )
    differences: dict[str, dict[str, list[float]]] = {}
    fixtures, counts, lesions_differ = [], {}, 0
    started, seconds = time.perf_counter(), 0.0
    for number, (kind, prediction, reference, spacing) in enumerate(list_pairs(given.labels, given.random, given.step)):
        tolerance = (0.5, 1.0, 2.0, 3.6)[number % 4]
        begun = time.perf_counter()
        measured = measure_surfaces(prediction, reference, spacing)
        ours = measured.metrics(tolerance) | {"Dice": evaluate_case(prediction, reference, {1: ""})[1]["Dice"]}
        seconds += time.perf_counter() - begun
        theirs = {
            "surface-distance": measure_by_deepmind(prediction, reference, spacing, tolerance),
            "MONAI": measure_by_monai(prediction, reference, spacing, tolerance),
            "MedPy": measure_by_medpy(prediction, reference, spacing),
        }
        if number % 4 == 0:  # which takes longer than all others
            theirs["mesh"] = measure_by_mesh(prediction, reference, spacing, tolerance)
        for tool, scores in theirs.items():
            for name, value in scores.items():
                differences.setdefault(tool, {}).setdefault(name, []).append(abs(value - ours[name]))
        found = match_lesions(prediction, reference)
        by_panoptica = count_by_panoptica(evaluator, prediction, reference)
        lesions_differ += (*found.values(),)[3:] != by_panoptica
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "random" and prediction.size < 1500 and len(fixtures) < 21:
            fixtures.append(
                {
                    "shape": prediction.shape,
                    "spacing": spacing,
                    "tolerance": tolerance,
                    "prediction": pack(prediction),
                    "reference": pack(reference),
                    "surface-distance": theirs["surface-distance"],
                    "panoptica": by_panoptica,
                }
            )
    told = {
        "pairs": counts,
        "lesion_counts_other_than_panoptica": lesions_differ,
        "differences": {
            tool: {
                name: {"largest": max(of), "median": float(np.median(of)), "mean": float(np.mean(of))}
                for name, of in scores.items()
            }
            for tool, scores in differences.items()
        },
        "seconds": {"ours": round(seconds, 1), "all": round(time.perf_counter() - started, 1)},
        "versions": {
            found.metadata["Name"]: found.version
            for found in distributions(path=[str(given.site), *sys.path])
            if found.metadata["Name"]
            in ("surface-distance", "MedPy", "medpy", "panoptica", "scikit-image", "monai", "scipy")
        },
    }
    print(json.dumps(told, indent=2))
    given.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    FIXTURES.write_text(json.dumps(fixtures, indent=1, default=float) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
