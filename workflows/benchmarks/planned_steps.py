"""Training steps of the Decathlon's ten planned networks: ours beside nnU-Net's, on one device, in turns.

python workflows/benchmarks/planned_steps.py --rounds 3 --result workflows/benchmarks/results/planned_steps.json

Each measurement is a process of its own, which starts while the one before it measures and waits for its turn before
it touches a batch. It trains on one random batch of the task's patch, which lies on the device: no case is read and
nothing is augmented. ``--compile-first`` runs every process of nnU-Net's once for a few batches, side by side: what
they compile is kept on the disk, where the measured ones find it.

nnU-Net's row is its ``nnUNetTrainerBenchmark_5epochs_noDataLoading`` (nnunetv2, needed for that row only), built from
nnU-Net's own plan of the task in ``datasets/msd`` and compiled as nnU-Net chooses. Of that trainer's epoch the training
batches are timed, not its 50 validation batches. Ours trains by the task's config in ``configs/msd``: its network,
loss, optimizer, averaged weights and recorded step.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from volseg import experiment
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Batch, Task
from volseg.data.catalogue import find_public_task, list_public_tasks
from volseg.experiment.building import build_training
from volseg.experiment.placed_network import build_model, choose_device
from volseg.monitoring.environment import environment
from volseg.workflow import Hook, Training

sys.path.append(str(Path(__file__).parents[1]))
from nnunet_architecture import describe_architecture

CONFIGS = Path(__file__).parents[2] / "configs" / "msd"
ITERATIONS = 250
"""Batches of an epoch, nnU-Net's number: seconds are given for so many."""


def main() -> None:
    """Measure every task by every row in turns, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[public.name for public in list_public_tasks()],
        metavar="TASK",
        help="default all ten",
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), help="default all that are installed")
    parser.add_argument("--rounds", type=int, default=3, help="0 to compile only")
    parser.add_argument("--warm-up", type=int, default=30, help="batches before the first that are timed")
    parser.add_argument("--windows", type=int, default=3, help="timed; the device is waited for at each end")
    parser.add_argument("--window", type=int, default=50, help="batches of a window")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one measurement")
    parser.add_argument("--compile-first", action="store_true", help="nnU-Net's networks, side by side")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of ours")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--wait", action="store_true", help="with --only: for a line on the standard input")
    parser.add_argument("--only", nargs=2, metavar=("ROW", "TASK"), help="measure here, and print it as JSON")
    chosen = parser.parse_args()
    if chosen.only:
        row, task = chosen.only
        print(json.dumps(ROWS[row](task, chosen)))
        return
    if chosen.result is None:
        parser.error("name the file for the result by --result")
    chosen.rows = chosen.rows or [row for row in ROWS if row == "ours" or find_spec("nnunetv2")]
    if chosen.compile_first and "nnunet" in chosen.rows:
        compile_first(chosen)
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    turns = [(row, task) for _ in range(chosen.rounds) for task in chosen.tasks for row in chosen.rows]
    started = [start_apart(row, task, chosen) for row, task in turns[:1]]
    for number, (row, task) in enumerate(turns):
        started += [start_apart(*following, chosen) for following in turns[number + 1 : number + 2]]
        measured = finish_apart(started[number], chosen)
        rounds.setdefault(task, {}).setdefault(row, []).append(measured)
        print(f"{task}, {row}: {measured}", flush=True)
        write(chosen, rounds)  # after each: a machine may be taken away


def compile_first(chosen: argparse.Namespace) -> None:
    """Let every network of nnU-Net's be compiled, each by a process, all at the same time."""
    few = argparse.Namespace(**vars(chosen) | {"warm_up": 1, "windows": 1, "window": 2})
    processes = [start_apart("nnunet", task, few) for task in chosen.tasks]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for task, process in zip(chosen.tasks, processes, strict=True):
        print(f"compiled {task}: {finish_apart(process, few)}", flush=True)


def start_apart(row: str, task: str, chosen: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start a measurement in a process of its own, which waits for its turn."""
    command = [sys.executable, str(Path(__file__).resolve()), "--only", row, task, "--wait", "--device", chosen.device]
    for name in ("warm_up", "windows", "window", "seconds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(chosen, name))]
    command += [part for override in chosen.overrides for part in ("--set", override)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8")


def finish_apart(process: "subprocess.Popen[str]", chosen: argparse.Namespace) -> dict[str, Any]:
    """Let a process measure and return what it found; a row that fails must not lose the others."""
    # Twice the limit: compiling and tuning come before the first batch that is timed.
    limit = 2 * chosen.seconds + 60
    try:
        out, error = process.communicate("go\n", timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"no result within {limit:.0f} s"}
    if process.returncode:
        return {"failed": error.strip()[-600:]}
    return json.loads(out.strip().splitlines()[-1])


def write(chosen: argparse.Namespace, rounds: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Write what was measured so far: medians over the rounds, and how many times nnU-Net's speed ours is."""
    medians: dict[str, dict[str, Any]] = {}
    for task, rows in rounds.items():
        medians[task] = {row: summarise(measured) for row, measured in rows.items()}
        ours, theirs = (medians[task].get(row, {}).get("seconds_per_250_iterations") for row in ("ours", "nnunet"))
        medians[task]["ours_over_nnunet"] = theirs / ours if ours and theirs else None
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "batches": {"warm_up": chosen.warm_up, "window": chosen.window, "windows": chosen.windows},
        "tasks": medians,
        "rounds": rounds,
    }
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def summarise(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over the rounds, or what went wrong in all of them."""
    sound = [one for one in measured if "failed" not in one]
    if not sound:
        return {"failed": measured[-1]["failed"]}
    numbers = [key for key, value in sound[0].items() if isinstance(value, int | float)]
    told = {key: value for key, value in sound[0].items() if key not in numbers}
    return told | {key: statistics.median(one[key] for one in sound) for key in numbers}


def measure_ours(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train by the task's config on one batch, again and again."""
    [path] = CONFIGS.glob(f"{name[:6].lower()}_*.yaml")
    overrides = [*chosen.overrides, f"device={chosen.device}", "training.epochs=1000000", "training.clip=12"]
    config = experiment.load_config(path, overrides)
    manifest, device = find_public_task(name).manifest, choose_device(config)
    task = Task(
        name=name,
        root=Path(name),
        modalities=tuple(manifest["modalities"]),
        labels=dict(manifest["labels"]),
        training=(),
        test=(),
    )
    torch.manual_seed(config.seed)
    model = build_model(config, task, device)
    clock = Windows(chosen, device)
    training = build_training(config, model, OneBatch(config, task, device), validation=None, hooks=[clock], task=task)
    with suppress(Measured):
        training.run()
    plan = {"patch": list(config.patch.size), "batch": config.patch.batch, "kernels": type(model).__name__}
    return {**plan, **clock.result()}


class OneBatch:
    """One random batch, as often as it is asked for; `EpochBatches` for the training loop."""

    def __init__(self, config: ExperimentConfig, task: Task, device: torch.device) -> None:
        shape = (config.patch.batch, task.num_channels, *config.patch.size)
        label = torch.randint(task.num_classes, (shape[0], 1, *shape[2:]), dtype=torch.uint8, device=device)
        self.batch: Batch = {"image": torch.rand(shape, device=device), "label": label}
        self.length = config.training.iterations

    def __len__(self) -> int:
        return self.length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from ``start`` on."""
        del number
        for _ in range(start, self.length):
            yield self.batch


class Measured(Exception):  # noqa: N818  (no error: it leaves the loop)
    """All windows have been timed."""


class Windows(Hook):
    """A stopwatch that looks at the clock at each end of a window."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self.warm_up, self.window, self.windows = chosen.warm_up, chosen.window, chosen.windows
        self.device = device
        if chosen.wait:
            sys.stdin.readline()  # until it is this process's turn
        self.deadline = time.perf_counter() + chosen.seconds
        self.count, self.marks = 0, list[float]()

    def on_batch_end(self, training: Training, fields: Any) -> None:
        """Count a batch of the training loop."""
        del training, fields
        self.after_batch()

    def after_batch(self) -> None:
        """Take the time where a window ends.

        Raises
        ------
        Measured
            When there are enough, or the limit is reached.
        """
        self.count += 1
        past = self.count - self.warm_up
        if past >= 0 and past % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append(time.perf_counter())
        if len(self.marks) > self.windows or (len(self.marks) > 1 and time.perf_counter() > self.deadline):
            raise Measured

    def result(self) -> dict[str, float]:
        """Return seconds of an epoch's batches, and the most memory that was taken at a time."""
        spans = [end - begin for begin, end in zip(self.marks, self.marks[1:], strict=False)]
        seconds = statistics.median(spans) / self.window * ITERATIONS
        if self.device.type == "cuda":
            peak, held = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        else:
            peak = held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds_per_250_iterations": seconds,
            "peak_allocated_gib": peak / 2**30,
            "peak_reserved_gib": held / 2**30,
        }


def measure_nnunet(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train nnU-Net's trainer of benchmarks on its random batch."""
    manifest = find_public_task(name).manifest
    device = torch.device(chosen.device)
    with tempfile.TemporaryDirectory() as scratch:
        for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
            os.environ[variable] = scratch  # looked at when nnunetv2 is imported
        # Needed for this row only, and installed by who wants it.
        from nnunetv2.training.nnUNetTrainer.variants.benchmarking import (
            nnUNetTrainerBenchmark_5epochs_noDataLoading as benchmarking,
        )

        described = {
            "channel_names": {str(number): channel for number, channel in enumerate(manifest["modalities"])},
            "labels": {label: value for value, label in manifest["labels"].items()},
            "numTraining": manifest["num_training"],
            "file_ending": ".nii.gz",
        }
        trainer = benchmarking.nnUNetTrainerBenchmark_5epochs_noDataLoading(
            nnunet_plans(manifest), "3d_fullres", 0, described, device
        )
        prepared = Path(trainer.preprocessed_dataset_folder)
        prepared.mkdir(parents=True)
        (prepared / "none.b2nd").touch()  # of which the trainer reads the suffix
        torch.backends.cudnn.benchmark = True  # as nnUNetv2_train sets it
        trainer.initialize()
        trainer.network.train()
        clock = Windows(chosen, device)
        with suppress(Measured):
            while True:
                trainer.train_step(trainer.dummy_batch)
                clock.after_batch()
        compiled = isinstance(trainer.network, torch._dynamo.OptimizedModule)
    plan = {"patch": manifest["nnunet"]["patch"], "batch": trainer.batch_size, "compiled": str(compiled)}
    return {**plan, **clock.result()}


def nnunet_plans(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return nnU-Net's plans file of a task, of which a training without data reads this much; axes slices first."""
    known = manifest["nnunet"]
    turned = {name: [axes[::-1] for axes in known[name]] for name in ("kernels", "strides")}
    configuration = {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "batch_size": known["batch"],
        "patch_size": known["patch"][::-1],
        "spacing": known["spacing"][::-1],
        "architecture": describe_architecture(known["filters"], **turned),
        "batch_dice": False,
    }
    return {
        "continue_training": False,
        "dataset_name": f"Dataset{int(manifest['name'][4:6]):03d}_{manifest['name'][7:]}",
        "plans_name": "nnUNetPlans",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {"3d_fullres": configuration},
        "label_manager": "LabelManager",
    }


ROWS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {"ours": measure_ours, "nnunet": measure_nnunet}

if __name__ == "__main__":
    main()
