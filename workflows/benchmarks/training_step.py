"""Milliseconds of a training step by part, for memory layouts and cuDNN settings, side by side in one run.

python workflows/benchmarks/training_step.py configs/task04_unet.yaml DIR/Task04_Hippocampus --result step.json
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from volseg import experiment
from volseg.data.msd import load_task
from volseg.data.preparing import prepare_all
from volseg.experiment.building import build_batches, build_model, build_training, choose_device, preprocessing_of
from volseg.monitoring.environment import environment

NUM_CASES = 32
WARM_UP, MEASURED = 10, 40


def main() -> None:
    """Measure every variant and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    config = experiment.load_config(chosen.config, [f"data.root={chosen.root}"])
    device, task = choose_device(config), load_task(chosen.root)
    cases = prepare_all(task.training[:NUM_CASES], preprocessing_of(config))
    batches = build_batches(config, task, cases, device)
    variants = {}
    for layout in ("contiguous", "channels_last_3d"):
        for benchmark in (False, True):
            torch.backends.cudnn.benchmark = benchmark
            model = build_model(config, task, device)
            if layout == "channels_last_3d":
                model = model.to(memory_format=torch.channels_last_3d)
            variants[f"{layout}, cudnn.benchmark={benchmark}"] = measure(config, model, batches, device)
            print(layout, benchmark, variants[f"{layout}, cudnn.benchmark={benchmark}"], flush=True)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "config": config.model_dump(mode="json"),
        "milliseconds": variants,
    }
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(config: object, model: nn.Module, batches: object, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of the whole step and of its parts, the device waited for after each."""
    training = build_training(config, model, batches, validation=None, hooks=[])
    model.train()
    source = islice(batches.epoch(0), WARM_UP + MEASURED)
    parts: dict[str, list[float]] = {"batch and augmentation": [], "forward to step": [], "launching": []}
    for _ in range(WARM_UP + MEASURED):
        begin = now(device)
        batch = next(source)
        made = now(device)
        training._train_batch(batch)
        launched = time.perf_counter()
        end = now(device)
        for name, seconds in zip(parts, (made - begin, end - made, launched - made), strict=True):
            parts[name].append(1000 * seconds)
    return {name: statistics.median(values[WARM_UP:]) for name, values in parts.items()}


def now(device: torch.device) -> float:
    """Return the time once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
