"""Batches per second by how many cases lie on the GPU: all, half of their bytes, none; and whether batches are alike.

python workflows/benchmarks/residency.py configs/task04_unet.yaml DIR/Task04_Hippocampus \
        --result workflows/benchmarks/results/residency_h200.json

Each row trains as `volseg train` does, timed in windows as by throughput.py, and then makes batches alone, as fast as
they come. The digest is of an epoch's first batches, voxel by voxel.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from throughput import Windows, ours

from volseg import experiment
from volseg.config.schema import ExperimentConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.cases import Case, Task
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.experiment.building import build_batches, preprocessing_of
from volseg.experiment.placed_network import choose_device
from volseg.monitoring.environment import environment

DIGESTED = 20
"""Batches that are compared."""


def main() -> None:
    """Measure the three rows and write what they came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--warm-up", type=int, default=30, help="batches before the first window")
    parser.add_argument("--window", type=int, default=50, help="batches per window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40, help="limit per row; windows not ended by then are left")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()

    def configure(*overrides: str) -> ExperimentConfig:
        return experiment.load_config(chosen.config, [*chosen.overrides, *overrides, f"data.root={chosen.root}"])

    config, task = configure(), load_task(chosen.root)
    cases = prepare_all(task.training, preprocessing_of(config))
    size = sum(case["image"].numel() * 4 + case["label"].numel() for case in cases)
    rows = {
        "all": configure("data.keep=device"),
        "half": configure("data.keep=auto", f"data.device_limit={size / 2**31}"),
        "none": configure("data.keep=memory"),
    }
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "workers": len(os.sched_getaffinity(0)),
        "rows": {name: measure(row, task, cases, chosen) for name, row in rows.items()},
        "config": config.model_dump(mode="json"),
    }
    result["same_bits"] = len({row["digest"] for row in result["rows"].values()}) == 1
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("rows", "same_bits")}, indent=2))


def measure(config: ExperimentConfig, task: Task, cases: Sequence[Case], chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what one placement of the cases comes to."""
    device = choose_device(config)
    clock = Windows(chosen, device)
    ours(config, task, list(cases), device, clock)
    batches = build_batches(config, task, cases, device)
    bank = batches.batches.bank
    return {
        "cases_on_device": bank.num_on_device,
        "cases": len(bank),
        "training": clock.result(),
        "batches_alone_per_second": count_alone(batches, device, chosen.window * chosen.windows),
        "digest": digest(batches),
    }


def count_alone(batches: AugmentedBatches, device: torch.device, count: int) -> float:
    """Return batches per second without a network."""
    source = batches.epoch(0)
    next(source)
    synchronize(device)
    begin = time.perf_counter()
    made = sum(1 for _, _ in zip(range(count), source, strict=False))
    synchronize(device)
    return made / (time.perf_counter() - begin)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def digest(batches: AugmentedBatches) -> str:
    """Return the digest of an epoch's first batches."""
    found = sha256()
    for _, batch in zip(range(DIGESTED), batches.epoch(1), strict=False):
        for name in ("image", "label"):
            found.update(batch[name].cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
