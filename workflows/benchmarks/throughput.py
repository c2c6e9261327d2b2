"""Batches per second of a config's training: ours beside the plain MONAI loop, in one run on the same cores.

python workflows/benchmarks/throughput.py configs/task04_unet.yaml DIR/Task04_Hippocampus --cores 2 \
        --result workflows/benchmarks/results/dynunet_h200_batches_per_second.json

Each loop makes its batches (crop, augmentation), trains on them, and is timed in windows of batches, the device waited
for at a window's end only. A warm-up comes first: recording and tuning are not what is measured.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plain_monai
import torch
from cores import restart_on

from volseg import experiment
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Case, Task
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.experiment.building import build_batches, build_training, preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.monitoring.environment import environment
from volseg.workflow import Hook, Training

NEVER = 10**9
"""Batches that no loop reaches."""


def main() -> None:
    """Time the chosen loops one after another and write what they came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cores", type=int, help="CPU cores to use; default all")
    parser.add_argument("--cases", type=int, help="cases to use; default all")
    parser.add_argument("--rows", nargs="+", choices=("ours", "monai", "monai_gpu"), default=["ours", "monai"])
    parser.add_argument("--warm-up", type=int, default=30, help="batches before the first window")
    parser.add_argument("--window", type=int, default=20, help="batches per window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="limit per loop; windows not ended by then are left")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    restart_on(chosen.cores)

    config = experiment.load_config(chosen.config, [*chosen.overrides, f"data.root={chosen.root}"])
    device, task = choose_device(config), load_task(chosen.root)
    cases = prepare_all(task.training[: chosen.cases], preprocessing_of(config))
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "device": device.type,
        "workers": len(os.sched_getaffinity(0)),
        "batches": {"warm_up": chosen.warm_up, "window": chosen.window, "windows": chosen.windows},
        "config": config.model_dump(mode="json"),
        "rows": {},
    }
    for name in chosen.rows:
        clock = Windows(chosen, device)
        try:
            ROWS[name](config, task, cases, device, clock)
        except Exception as fault:  # one loop must not lose the others
            result["rows"][name] = {"failed": f"{type(fault).__name__}: {fault}"}
        else:
            result["rows"][name] = clock.result()
        print(name, result["rows"][name], flush=True)
    rates = {name: row["batches_per_second"] for name, row in result["rows"].items() if "failed" not in row}
    result["ours_over"] = {name: rates["ours"] / rate for name, rate in rates.items() if "ours" in rates}
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["ours_over"]))


class Windows:
    """A stopwatch that is told after every batch."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self.warm_up, self.window, self.windows = chosen.warm_up, chosen.window, chosen.windows
        self.device, self.begin, self.deadline = device, time.perf_counter(), time.perf_counter() + chosen.seconds
        self.count, self.marks = 0, list[float]()

    def after_batch(self) -> bool:
        """Take the time where a window ends; return whether everything is measured, or the limit is reached."""
        self.count += 1
        past = self.count - self.warm_up
        if past >= 0 and past % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append(time.perf_counter())
        return len(self.marks) > self.windows or time.perf_counter() > self.deadline

    def result(self) -> dict[str, float | list[float]]:
        """Return the median rate.

        Raises
        ------
        RuntimeError
            If no window was ended.
        """
        if len(self.marks) < 2:
            raise RuntimeError(
                f"{self.count} batches until the limit, fewer than warm-up and a window; raise --seconds"
            )
        seconds = [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]
        return {
            "batches_per_second": self.window / statistics.median(seconds),
            "milliseconds_per_batch": 1000 * statistics.median(seconds) / self.window,
            "windows_seconds": seconds,
            "seconds_to_first_window": self.marks[0] - self.begin,
        }


class StopAfter(Hook):
    """End a training when its stopwatch says so."""

    def __init__(self, clock: Windows) -> None:
        self.clock = clock

    def on_batch_end(self, training: Training, fields: object) -> None:  # noqa: ARG002 (names of the event)
        """Tell the stopwatch."""
        if self.clock.after_batch():
            raise Measured


class Measured(Exception):  # noqa: N818 (not a fault: the way out of a loop that would go on)
    """Everything is measured."""


def ours(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run the training of the config as `volseg train` does."""
    model = build_model(config, task, device)
    batches = build_batches(config, task, cases, device)
    training = build_training(config, model, batches, validation=None, hooks=[StopAfter(clock)])
    try:
        training.run()
    except Measured:
        return
    raise RuntimeError(f"the config's training ended after {clock.count} batches; set training.epochs higher")


def monai(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run the plain loop, samples made in one worker process per core."""
    loader = plain_monai.in_workers(config, cases, len(os.sched_getaffinity(0)), NEVER)
    until_measured(plain_monai.steps(config, task, loader, device), clock)


def monai_gpu(config: ExperimentConfig, task: Task, cases: list[Case], device: torch.device, clock: Windows) -> None:
    """Run MONAI's fast form."""
    loader = plain_monai.on_gpu(config, cases, device, NEVER)
    until_measured(plain_monai.steps(config, task, loader, device), clock)


def until_measured(steps: Iterator[None], clock: Windows) -> None:
    """Take steps until the stopwatch has its windows."""
    for _ in steps:
        if clock.after_batch():
            return


ROWS: dict[str, Callable[[ExperimentConfig, Task, list[Case], torch.device, Windows], None]] = {
    "ours": ours,
    "monai": monai,
    "monai_gpu": monai_gpu,
}

if __name__ == "__main__":
    main()
