r"""How long scoring takes: a CT of 512 x 512 x 300 with 15 labels; with ``--site``, DeepMind's package on the same.

    python workflows/benchmarks/scores.py --result workflows/benchmarks/results/scores_cpu_labels15.json [--site SITE] \
        [--labels Task04_Hippocampus/labelsTr]

``--labels``: 42 label maps of a folder besides, each beside itself moved by a voxel, as many as validate in a fold.

``SITE`` is a folder as ``scores_compared.py`` needs it. CPU seconds are those of all threads: on a machine
that others use, the wall clock says nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from monai.data import MetaTensor

from volseg.data.readers import read_volume
from volseg.evaluation.overlap import evaluate_case
from volseg.evaluation.scoring import Scoring

sys.path.append(str(Path(__file__).parents[1]))
from scores_compared import measure_by_deepmind, prepare_packages

SHAPE, SPACING, NUM_LABELS, TOLERANCE = (512, 512, 300), (0.7, 0.7, 1.5), 15, 2.0


def draw_label_map() -> np.ndarray:
    """Return ellipsoids of 2 to 9 cm that lie over each other."""
    rng, grid = np.random.default_rng(0), np.ogrid[tuple(slice(side) for side in SHAPE)]
    voxels = np.zeros(SHAPE, np.uint8)
    for value in range(1, NUM_LABELS + 1):
        centre, radius = rng.uniform(0.2, 0.8, 3) * SHAPE, rng.uniform(20, 90, 3)
        voxels[sum(((g - c) / r) ** 2 for g, c, r in zip(grid, centre, radius, strict=True)) < 1] = value
    return voxels


def measure(call) -> dict[str, float]:
    """Return the seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return {"cpu_seconds": round(time.process_time() - cpu, 2), "seconds": round(time.perf_counter() - wall, 2)}


def measure_cases(references: list[MetaTensor]) -> dict[str, dict[str, float]]:
    """Return the seconds of scoring label maps beside themselves moved."""
    predictions = [MetaTensor(volume.as_tensor().roll(1, 1), affine=volume.affine) for volume in references]
    labels = {int(value): str(value) for volume in references for value in volume.unique() if value > 0}

    def score(scoring: Scoring | None) -> None:
        for prediction, reference in zip(predictions, references, strict=True):
            evaluate_case(prediction, reference, labels, scoring=scoring)

    return {
        "counts, Dice": measure(lambda: score(None)),
        "with HD95, HD, ASSD, NSD": measure(lambda: score(Scoring(tolerances=dict.fromkeys(labels, 1.0)))),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--site", type=Path)
    parser.add_argument("--labels", type=Path)
    given = parser.parse_args()
    reference = draw_label_map()
    prediction = np.roll(reference, (3, -2, 1), (0, 1, 2))
    affine = torch.diag(torch.tensor([*SPACING, 1.0], dtype=torch.float64))
    volumes = [MetaTensor(torch.from_numpy(voxels)[None], affine=affine) for voxels in (prediction, reference)]
    labels = {value: str(value) for value in range(1, NUM_LABELS + 1)}
    tolerances = dict.fromkeys(labels, TOLERANCE)
    asked = {
        "counts, Dice": None,
        "with HD95, HD, ASSD, NSD": Scoring(tolerances=tolerances),
        "with lesions too": Scoring(tolerances=tolerances, lesions=tuple(labels)),
    }
    told: dict = {
        "shape": SHAPE,
        "labels": NUM_LABELS,
        "torch": torch.__version__,
        **{
            name: measure(lambda scoring=scoring: evaluate_case(*volumes, labels, scoring=scoring))
            for name, scoring in asked.items()
        },
    }
    if given.site:
        prepare_packages(given.site)

        def measure_all() -> None:
            for value in labels:
                measure_by_deepmind(prediction == value, reference == value, SPACING, TOLERANCE)

        told["surface-distance 0.1"] = measure(measure_all)
    if given.labels:
        files = sorted(given.labels.glob("*.nii.gz"))[:42]
        told[f"{len(files)} cases of {given.labels.parent.name}"] = measure_cases([read_volume(file) for file in files])
    print(json.dumps(told, indent=2))
    given.result.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
