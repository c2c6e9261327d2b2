"""Train on synthetic data annotated as people annotate: regions, a few planes, parts of the structures, gaps in values.

python workflows/benchmarks/train_annotations.py --result workflows/benchmarks/results/unet_cpu_annotations.json

Five times the same images, anatomy and config, that of `volseg quickstart`: what differs is what the label files say.
The score is Dice as the training reports it, on what the annotation of the validation cases tells. Beside it stands
Dice of the same predictions against the full anatomy, which a sparse or partial annotation hides from the training and
from its score.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from volseg.data.layouts import load_task
from volseg.data.readers import read_volume
from volseg.data.synthetic import make_task
from volseg.data.synthetic_labels import STYLES, make_annotated_task
from volseg.evaluation.overlap import evaluate_case
from volseg.experiment import load_config, train
from volseg.monitoring.environment import environment

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
WANTED = {"regions": 0.85, "sparse": 0.85}
"""Mean Dice, where every structure was looked for in every case."""

VALUES = {"regions": {1: 1, 2: 4}, "gaps": {1: 7, 2: 500}}
"""The values of the two structures, where they are not 1 and 2."""


def main() -> None:
    """Train on each annotation and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["full", *STYLES], default=[*STYLES, "full"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--result", type=Path, help="where the JSON goes")
    chosen = parser.parse_args()
    rows: dict[str, Any] = {}
    result = {
        "question": "Dice of a small U-Net on synthetic data, by how the cases are annotated",
        "config": CONFIG.name,
        "epochs": chosen.epochs,
        "cases": chosen.cases,
        "wanted_mean_dice": WANTED,
        "annotations": rows,
        "environment": environment(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.only:
            rows[name] = train_on(name, Path(folder) / name, chosen.epochs, chosen.cases)
            print(name, json.dumps(rows[name]), flush=True)
            if chosen.result is not None:
                chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if low := [name for name, row in rows.items() if not row["mean_dice"] >= WANTED.get(name, 0)]:
        raise SystemExit(f"below the mean Dice of {WANTED}: {', '.join(low)}")


def train_on(name: str, folder: Path, epochs: int, num_cases: int) -> dict[str, Any]:
    """Train on one annotation; return Dice on what it tells, and against the full anatomy."""
    full = make_task(folder / "full", num_cases=num_cases, num_test=0)
    root = full if name == "full" else make_annotated_task(folder / "task", name, num_cases=num_cases)
    overrides = [f"data.root={root}", f"output={folder / 'run'}", f"training.epochs={epochs}"]
    begun = time.perf_counter()
    outcome = train(load_config(CONFIG, [*overrides, f"training.validate_every={epochs}"]))
    seconds = time.perf_counter() - begun
    assert outcome.validated is not None
    return {
        "mean_dice": round(outcome.validated.score, 4),
        **{key: None if math.isnan(value) else round(value, 4) for key, value in outcome.validated.scores.items()},
        "full_anatomy": score_fully(outcome.folder.validation, full, VALUES.get(name, {1: 1, 2: 2})),
        "seconds": round(seconds),
    }


def score_fully(predictions: Path, full: Path, values: dict[int, int]) -> dict[str, float]:
    """Return the mean Dice of each structure of the predictions against what the anatomy was drawn with."""
    references = {case["case"]: case["label"] for case in load_task(full).training}
    dice: dict[int, list[float]] = {1: [], 2: []}
    for path in sorted(predictions.glob("*.nii.gz")):
        prediction, reference = read_volume(path), read_volume(references[path.name.removesuffix(".nii.gz")])
        drawn = sum((reference == value) * written for value, written in values.items())
        metrics = evaluate_case(prediction.as_tensor(), drawn.as_tensor(), {v: str(v) for v in values.values()})
        for value, written in values.items():
            dice[value].append(metrics[written]["Dice"])
    means = {f"structure_{value}": math.fsum(found) / len(found) for value, found in dice.items()}
    return {key: round(value, 4) for key, value in means.items()}


if __name__ == "__main__":
    main()
