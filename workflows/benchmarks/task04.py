"""Dice and time of a Task04 config on this machine, as JSON and SVG: each fold from the cold start of its own process.

python workflows/benchmarks/task04.py configs/task04_unet.yaml DIR/Task04_Hippocampus --cores 2 --gpus 4 \
        --folds 0 1 2 3 4 --result workflows/benchmarks/results/dynunet_h200_task04_folds.json

With ``--cold`` each fold has an empty cache of Triton's kernels and none of prepared cases, as on a machine where
nothing has run; else it has what this machine has. The seconds of a fold begin when its process is started and end when
that has exited: imports, reading, checking, preprocessing, training, validation with mirroring and the writing of the
predictions lie between. The curve's points are the validations on the way (not mirrored), by the same clock.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from results import Series, make_parser, plot_series, write_result
from workers import share_gpus

CLOCK = "clock.json"
"""File of a fold's run folder: when its training began and its validations were done, since the process was started."""

COLOURS = ("#1b6ca8", "#2a9d8f", "#8e44ad", "#d9a441", "#6b8e23")


def first_cores(count: int, place: int = 0) -> set[int]:
    """Return the ``place``-th ``count`` cores of those this process may use.

    Raises
    ------
    SystemExit
        If there are fewer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[place * count : (place + 1) * count]
    if len(chosen) < count:
        sys.exit(f"--cores {count} for {place + 1} process(es) needs {(place + 1) * count} cores, got {len(allowed)}")
    return set(chosen)


def main() -> None:
    """Train the folds, as many at a time as there are GPUs; write what all of them came to."""
    parser = make_parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="where the run folders go")
    parser.add_argument("--gpus", type=int, default=1, help="folds at a time, each on a GPU of its own")
    parser.add_argument("--cores", type=int, help="CPU cores of each fold; default an equal share of all")
    parser.add_argument("--cold", action="store_true", help="compile all kernels and prepare all cases in each fold")
    parser.add_argument("--result", type=Path, required=True, help="JSON file; the plot lies beside it")
    parser.add_argument("--train-fold", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train_fold is not None:
        train_fold(chosen)
        return
    chosen.cores = chosen.cores or len(os.sched_getaffinity(0)) // chosen.gpus
    seconds = train_folds(chosen)
    result = gathered(chosen, seconds)
    write_result(chosen.result, **result)
    draw(result, chosen.result.with_suffix(".svg"))


def train_folds(chosen: argparse.Namespace) -> dict[int, float]:
    """Train each fold in a process of its own; return the seconds of each process.

    Raises
    ------
    SystemExit
        If a fold fails; the others are trained to their end.
    """
    # Counted once: a thread that has trained a fold may use that fold's cores only.
    cores = [first_cores(chosen.cores, place) for place in range(chosen.gpus)]

    def train(fold: int, place: int) -> float:
        os.sched_setaffinity(0, cores[place])  # of this thread, for the process that it starts
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": str(place)} if chosen.gpus > 1 else {})}
        if chosen.cold:
            environment["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton_")
        begin, started = time.perf_counter(), time.time()
        again = [sys.executable, *sys.argv, "--train-fold", str(fold), "--started", repr(started)]
        subprocess.run(again, env=environment, check=True)
        return time.perf_counter() - begin

    return share_gpus({fold: partial(train, fold) for fold in chosen.folds}, chosen.gpus)


def train_fold(chosen: argparse.Namespace) -> None:
    """Train one fold as `volseg train` does, and write down when each validation was done."""
    from volseg import experiment
    from volseg.checkpointing.state import EpochRecord
    from volseg.workflow import Hook, Training

    class Clock(Hook):
        """Seconds since the start of the process, at each validation."""

        def __init__(self) -> None:
            self.curve: list[dict[str, float]] = []
            self.seconds_to_training = 0.0

        def on_training_begin(self, training: Training) -> None:  # noqa: ARG002 (names of the event)
            """Everything has been imported, read and prepared."""
            self.seconds_to_training = time.time() - chosen.started

        def on_epoch_end(self, training: Training, record: EpochRecord) -> None:  # noqa: ARG002
            """Note the epochs that were validated."""
            if record.score is not None:
                point = {"epoch": record.epoch, "seconds": time.time() - chosen.started, "mean_dice": record.score}
                self.curve.append(point)

    clock = Clock()
    outcome = experiment.train(config_of(chosen, chosen.train_fold), hooks=[clock])
    times = {"seconds_to_training": clock.seconds_to_training, "curve": clock.curve}
    outcome.folder.write_json(CLOCK, times)


def config_of(chosen: argparse.Namespace, fold: int | None = None) -> Any:
    """Return the config of one fold, or of all of them."""
    from volseg import experiment

    folder = chosen.runs / chosen.config.stem
    own = [f"output={folder}"] if fold is None else [f"output={folder / f'fold_{fold}'}", f"split.fold={fold}"]
    cold = ["data.cache=none"] if chosen.cold else []
    return experiment.load_config(chosen.config, [*chosen.overrides, *cold, f"data.root={chosen.root}", *own])


def gathered(chosen: argparse.Namespace, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Return what the folds left in their folders."""
    from volseg import experiment

    config = config_of(chosen)
    crossed = experiment.cross_validate(config, folds=chosen.folds)  # they are finished: nothing is trained
    print(experiment.format_cross_validation(crossed))
    return {
        "cold": chosen.cold,
        "cores_per_fold": chosen.cores,
        "folds_at_a_time": chosen.gpus,
        "folds": [
            {"fold": fold.number, "seconds": seconds[fold.number], **described(fold)}
            for fold in crossed.folds
            if fold.number in seconds
        ],
        "config": config.model_dump(mode="json"),
        "mean_dice": sum(fold.mean_dice for fold in crossed.folds) / len(crossed.folds),
        "over_cases": {label.name: asdict(label.over_cases) for label in crossed.labels},
    }


def described(fold: Any) -> dict[str, Any]:
    """Return one fold's numbers."""
    from volseg.reporting.sections import add_spans

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
        "seconds_by_part": add_spans(fold.folder.times()),
        **json.loads((fold.folder.path / CLOCK).read_text(encoding="utf-8")),
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a curve per fold; its last point is the Dice of the final predictions."""
    curves = [
        Series(
            name=f"volseg {result['config']['name']}, fold {fold['fold']}, {result['cores_per_fold']} cores: "
            f"{fold['mean_dice']:.4f} after {fold['seconds']:.0f} s",
            colour=COLOURS[fold["fold"] % len(COLOURS)],
            points=[
                *((point["seconds"], point["mean_dice"]) for point in fold["curve"]),
                (fold["seconds"], fold["mean_dice"]),
            ],
            is_line=True,
        )
        for fold in result["folds"]
    ]
    longest = max(curve.points[-1][0] for curve in curves)
    highest = max(0.9, *(dice for curve in curves for _, dice in curve.points))
    plot_series(path, "mean Dice over seconds since the start of the process", curves, (longest, highest), low=0.7)


if __name__ == "__main__":
    main()
