"""Milliseconds of a training step with and without checkpoints every so many seconds, by turns in one process.

python workflows/benchmarks/checkpointing.py configs/task04_unet.yaml DIR/Task04_Hippocampus \
        --every 60 --result workflows/benchmarks/results/unet_h200_checkpointing.json

Without a task's folder the cases are synthetic. A turn without checkpoints and one with them follow each other, as long
as ``--turn`` says; what else the machine does shows in the turns. A step is counted when the device has done it.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from volseg import experiment
from volseg.data.cases import Batch
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.data.synthetic import make_task
from volseg.experiment.building import build_batches, build_training, preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.monitoring.environment import environment
from volseg.workflow import Checkpoints, Training, TrainingState

NUM_CASES = 16
WARM_UP = 20


class TimedCheckpoints(Checkpoints):
    """Checkpoints that say how long the loop and the thread were busy with each."""

    def __init__(self, folder: Path, every_seconds: float) -> None:
        super().__init__(folder, every_minutes=every_seconds / 60)
        self.taking_ms: list[float] = []
        self.writing_ms: list[float] = []

    def _take(self, training: Training, name: str) -> None:
        begin = time.perf_counter()
        super()._take(training, name)
        self.taking_ms.append(1000 * (time.perf_counter() - begin))

    def _save(self, name: str, state: TrainingState) -> None:
        begin = time.perf_counter()
        super()._save(name, state)
        self.writing_ms.append(1000 * (time.perf_counter() - begin))

    def finish(self) -> None:
        """Wait for what is being written, and count the time to the next one from now."""
        super().finish()
        self._taken_at = time.monotonic()


def main() -> None:
    """Measure the turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, nargs="?", help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--every", type=float, nargs="+", default=[60.0], help="seconds between two checkpoints")
    parser.add_argument("--turn", type=float, help="seconds of a turn; default twice the time between two checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; default a temporary one")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as scratch:
        root = chosen.root or make_task(Path(scratch) / "Task00_Synthetic", num_cases=NUM_CASES, num_test=0)
        overrides = [*chosen.overrides, f"data.root={root}"]
        config = experiment.load_config(chosen.config, overrides)
        device, task = choose_device(config), load_task(root)
        cases = prepare_all(task.training[:NUM_CASES], preprocessing_of(config))
        batches = build_batches(config, task, cases, device)
        model = build_model(config, task, device)
        training = build_training(config, model, batches, validation=None, hooks=[])
        model.train()
        source = chain.from_iterable(batches.epoch(number) for number in count())
        run_steps(training, source, steps=WARM_UP)
        rows = [compared(training, source, every, chosen, Path(scratch)) for every in chosen.every]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "device": str(device),
        "config": config.model_dump(mode="json"),
        "rows": rows,
    }
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def compared(
    training: Training, source: Iterator[Batch], every: float, chosen: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Return the milliseconds of a step in turns without and with checkpoints."""
    folder = scratch / f"every_{every:g}"
    checkpoints = TimedCheckpoints(folder, every)
    turns: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(chosen.rounds):
        for name, hooks in (("without", []), ("with", [checkpoints])):
            training.hooks = hooks
            checkpoints.finish()
            turns[name].append(run_steps(training, source, seconds=chosen.turn or 2.2 * every))
            print(f"every {every:g} s, {name}: {turns[name][-1]:.3f} ms", flush=True)
    checkpoints.finish()
    medians = {name: statistics.median(values) for name, values in turns.items()}
    return {
        "seconds_between_checkpoints": every,
        "step_ms": medians,
        "cost_percent": 100 * (medians["with"] / medians["without"] - 1),
        "turns_ms": turns,
        "checkpoints": len(checkpoints.writing_ms),
        "checkpoint_bytes": (folder / "latest.pt").stat().st_size,
        "loop_busy_ms": checkpoints.taking_ms,
        "thread_busy_ms": checkpoints.writing_ms,
    }


def run_steps(
    training: Training, source: Iterator[Batch], *, steps: float = float("inf"), seconds: float = float("inf")
) -> float:
    """Train for so many steps or seconds, as the training's own loop does; return milliseconds per step."""
    wait(training.device)
    begin, done = time.perf_counter(), 0
    training._stopping.interval.begin()
    while done < steps and time.perf_counter() - begin < seconds:
        training._train_batch(training._on_device(next(source)))
        done += 1
        training._stopping.interval.count()
        if training._stopping.interval.is_due:
            training._look()
        if training.position == training.num_batches:  # an epoch's end without its validation
            training.epoch, training.position = training.epoch + 1, 0
            training._losses = training._new_losses()
    wait(training.device)
    return 1000 * (time.perf_counter() - begin) / done


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
