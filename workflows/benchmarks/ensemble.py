"""Five folds as an ensemble against single folds, on cases that none of them saw, mirrored and not.

Some cases of Task04 are held out before the folds are made; the folds are those of the others, written as a split file.
They are trained at once, a process each on the same GPU, which these small networks leave idle most of the time. Then
every fold by itself, and all of them together, predict the cases that were held out::

    python workflows/benchmarks/ensemble.py DIR/Task04_Hippocampus --output unet_h200_ensemble.json --runs /tmp/runs

The folds that are in ``--runs`` already are not trained again. A difference is that of the same cases: its interval is
a bootstrap over cases, its p-value Wilcoxon's signed-rank test, two-sided.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from volseg.config.schema import ExperimentConfig
from volseg.data import load_task
from volseg.data.cases import Case, Task
from volseg.data.preprocessed import prepare_all
from volseg.data.splits import folds, write_splits
from volseg.evaluation.intervals import mean_intervals
from volseg.evaluation.overlap import evaluate_case
from volseg.experiment import cross_validate, load_config
from volseg.experiment.fold_workers import train_in_processes
from volseg.experiment.folds import plan_folds
from volseg.experiment.sources import load_trained
from volseg.experiment.trained import Trained
from volseg.monitoring.environment import environment

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "task04_unet.yaml"

Scores = NDArray[np.float64]
"""Dice, ``(cases, labels)``; NaN where a case neither has nor is given a label."""


def hold_out(task: Task, count: int, num_folds: int, seed: int, file: Path) -> list[Case]:
    """Draw the cases that no fold sees, write the folds of the others, and return what was drawn."""
    ids = sorted(case["case"] for case in task.training)
    held = set(np.random.default_rng(seed).permutation(ids)[:count].tolist())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_splits(file, folds([name for name in ids if name not in held], num_folds))
    return [case for case in task.training if case["case"] in held]


def train_folds(config: ExperimentConfig, task: Task, at_once: int) -> None:
    """Train every fold that is not finished, so many at a time on one GPU, and write the cross-validation's report."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if on_gpu else None
    waiting = [fold for fold in plan_folds(config, task) if fold.result() is None]
    failures = train_in_processes(
        waiting, [gpu] * at_once, lambda fold, seconds: print(fold.folder.path, f"{seconds:.0f} s")
    )
    if failures:
        raise next(iter(failures.values()))
    cross_validate(config)  # trains none: it gathers


def score(trained: Trained, cases: Sequence[Case]) -> Scores:
    """Return the Dice of each prepared case and label, on the case's own grid."""
    predictor, found = trained.build_predictor(), {}
    for case, prediction in predictor.stream(cases, batch_size=trained.config.inference.batch):
        metrics = evaluate_case(prediction.labels.cpu(), case["reference"], trained.task.structures)
        found[case["case"]] = [metrics[key]["Dice"] for key in trained.task.structures]
    return np.array([found[case["case"]] for case in cases])


def describe(scores: Scores, names: Sequence[str]) -> dict[str, Any]:
    """Return the means with their intervals."""
    labels, overall = mean_intervals(scores)
    rows = dict(zip(["mean", *names], [overall, *labels], strict=True))
    return {name: {"dice": row.mean, "low": row.low, "high": row.high} for name, row in rows.items()}


def compare(better: Scores, worse: Scores) -> dict[str, Any]:
    """Return the mean difference of two predictions of the same cases."""
    _, overall = mean_intervals(better - worse)
    per_case = np.nanmean(better, axis=1) - np.nanmean(worse, axis=1)
    p_value = float(wilcoxon(per_case).pvalue) if per_case.any() else 1.0
    return {
        "difference": overall.mean,
        "low": overall.low,
        "high": overall.high,
        "wilcoxon_p": p_value,
        "cases_better": int((per_case > 0).sum()),
        "cases_worse": int((per_case < 0).sum()),
    }


def predict_all(
    runs: Path, cases: Sequence[Case], num_folds: int, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what single folds and the ensemble reach, and how far the ensemble is ahead, mirrored and not."""
    places = [runs / f"fold_{number}" for number in range(num_folds)]
    prepared = prepare_all(cases, load_trained(places[0]).preprocessing, keep_reference=True)
    reached: dict[str, Any] = {}
    ahead: dict[str, Any] = {}
    ensembles: dict[bool, Scores] = {}
    for mirror in (False, True):
        kind = "mirrored" if mirror else "plain"
        settings = [f"inference.mirror={str(mirror).lower()}"]
        by_fold = [score(load_trained(place, overrides=settings), prepared) for place in places]
        ensembles[mirror] = ensemble = score(load_trained(places, overrides=settings), prepared)
        reached[kind] = {
            "ensemble": describe(ensemble, names),
            **{f"fold_{number}": describe(scores, names) for number, scores in enumerate(by_fold)},
            "mean_of_folds": float(np.mean([np.nanmean(np.nanmean(scores, axis=0)) for scores in by_fold])),
        }
        ahead[f"ensemble over single folds, {kind}"] = {
            **{f"fold_{number}": compare(ensemble, scores) for number, scores in enumerate(by_fold)},
            "mean_of_folds": compare(ensemble, np.nanmean(by_fold, axis=0)),
        }
        for name, scores in {"ensemble": ensemble, **{f"fold {k}": one for k, one in enumerate(by_fold)}}.items():
            print(f"{kind:<9} {name:<9} Dice {np.nanmean(np.nanmean(scores, axis=0)):.4f}")
    ahead["mirrored over plain, ensemble"] = compare(ensembles[True], ensembles[False])
    return reached, ahead


@contextmanager
def measure(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long a part takes."""
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 1)


def main() -> None:
    """Train, predict, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the cross-validation")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the config"
    )
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=5, help="folds that are trained at a time, on one GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the cases that are held out")
    given = parser.parse_args()
    task, splits = load_task(given.task), given.runs.resolve() / "splits.json"
    held = hold_out(task, given.held_out, given.folds, given.seed, splits)
    values = [f"data.root={given.task.resolve()}", f"output={given.runs.resolve()}", f"split.file={splits}"]
    config = load_config(given.config, [*values, f"split.num_folds={given.folds}", *given.set])
    seconds: dict[str, float] = {}
    with measure(seconds, "training"):
        train_folds(config, task, given.at_once)
    with measure(seconds, "prediction"):
        reached, ahead = predict_all(given.runs, held, given.folds, list(task.structures.values()))
    result = {
        "held_out": [case["case"] for case in held],
        "cases_of_the_folds": len(task.training) - len(held),
        "folds": given.folds,
        "config": config.model_dump(mode="json", exclude={"data", "output", "split"}),
        "dice": reached,
        "ahead": ahead,
        "seconds": {**seconds, "folds_at_once": given.at_once},
        "environment": environment(),
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
