"""Dice and time of a Task04 config on this machine, as JSON: per fold the mean Dice, the seconds, and Dice over time.

python workflows/benchmarks/task04.py configs/task04_unet.yaml DIR/Task04_Hippocampus \
        --folds 0 --result workflows/benchmarks/results/task04_unet.json
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from volseg import experiment
from volseg.experiment.report import Outcome
from volseg.monitoring.environment import environment


def main() -> None:
    """Train the folds one after another; write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="where the run folders go")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()

    result: dict = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "folds": []}
    for fold in chosen.folds:
        output = chosen.runs / f"{chosen.config.stem}_fold{fold}"
        overrides = [*chosen.overrides, f"data.root={chosen.root}", f"split.fold={fold}", f"output={output}"]
        config = experiment.load_config(chosen.config, overrides)
        begin = time.perf_counter()
        outcome = experiment.train(config)
        result["folds"].append(described(outcome, fold, time.perf_counter() - begin))
        result["config"] = config.model_dump(mode="json")
        result["mean_dice"] = sum(f["mean_dice"] for f in result["folds"]) / len(result["folds"])
        chosen.result.parent.mkdir(parents=True, exist_ok=True)
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"fold {fold}: {result['folds'][-1]['mean_dice']:.4f} in {result['folds'][-1]['seconds']:.0f} s")


def described(outcome: Outcome, fold: int, seconds: float) -> dict:
    """Return one fold's numbers."""
    assert outcome.validated is not None
    training = [record.seconds for record in outcome.history]
    return {
        "fold": fold,
        "seconds": seconds,
        "seconds_training": sum(training),
        "milliseconds_per_iteration": 1000 * training[-1] / outcome.iterations,
        "seconds_waited_for_data": sum(record.seconds_waited for record in outcome.history),
        "peak_gib": (outcome.history[-1].peak_bytes or 0) / 2**30,
        "num_validation_cases": len(outcome.validated.summary["metric_per_case"]),
        "mean_dice": outcome.validated.score,
        "dice": dict(outcome.validated.scores),
        "curve": [
            {"epoch": record.epoch, "seconds_training": sum(training[: record.epoch + 1]), "mean_dice": record.score}
            for record in outcome.history
            if record.score is not None
        ],
    }


if __name__ == "__main__":
    main()
