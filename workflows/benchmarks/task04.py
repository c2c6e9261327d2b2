"""Dice and time of a Task04 config on this machine, as JSON: per fold the mean Dice, the seconds, and Dice over time.

python workflows/benchmarks/task04.py configs/task04_unet.yaml DIR/Task04_Hippocampus \
        --folds 0 --result workflows/benchmarks/results/task04_unet.json
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from volseg import experiment
from volseg.experiment.folds import FoldResult
from volseg.monitoring.environment import environment


def main() -> None:
    """Train the folds that are not finished, one after another; write what all of them came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="where the run folders go")
    parser.add_argument("--gpus", type=int, default=1, help="folds at a time, each on a GPU of its own")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()

    overrides = [*chosen.overrides, f"data.root={chosen.root}", f"output={chosen.runs / chosen.config.stem}"]
    config = experiment.load_config(chosen.config, overrides)
    crossed = experiment.cross_validate(config, folds=chosen.folds, gpus=chosen.gpus)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "folds": [
            {"fold": fold.number, "seconds": crossed.seconds.get(fold.number), **described(fold)}
            for fold in crossed.folds
        ],
        "config": config.model_dump(mode="json"),
        "mean_dice": sum(fold.mean_dice for fold in crossed.folds) / len(crossed.folds),
        "over_cases": {label.name: asdict(label.over_cases) for label in crossed.labels},
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(experiment.cross_validation_words(crossed))


def described(fold: FoldResult) -> dict:
    """Return one fold's numbers."""
    training = [record.seconds for record in fold.history]
    labels = fold.folder.task().labels
    return {
        "seconds_training": fold.seconds_training,
        "milliseconds_per_iteration": 1000 * training[-1] / fold.folder.config().training.iterations,
        "seconds_waited_for_data": sum(record.seconds_waited for record in fold.history),
        "peak_gib": (fold.history[-1].peak_bytes or 0) / 2**30,
        "num_validation_cases": len(fold.summary["metric_per_case"]),
        "mean_dice": fold.mean_dice,
        "dice": {f"dice/{labels[int(label)]}": mean["Dice"] for label, mean in fold.summary["mean"].items()},
        "curve": [
            {"epoch": record.epoch, "seconds_training": sum(training[: record.epoch + 1]), "mean_dice": record.score}
            for record in fold.history
            if record.score is not None
        ],
    }


if __name__ == "__main__":
    main()
