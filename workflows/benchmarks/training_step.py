"""Milliseconds of a training step by part: kernels, layouts, recording, determinism, side by side in one run.

python workflows/benchmarks/training_step.py configs/task04_unet.yaml DIR/Task04_Hippocampus --result step.json
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from itertools import chain, count, product
from pathlib import Path

import torch

from volseg import experiment
from volseg.config.schema import ExperimentConfig
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.experiment.building import build_batches, build_training, preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.monitoring.environment import environment
from volseg.workflow.randomness import deterministic

NUM_CASES = 32
WARM_UP, MEASURED = 10, 40


def main() -> None:
    """Measure every variant and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, and needed by the deterministic variants
    variants = {}
    for kernels, layout, record, repeatable in product(
        ("torch", "fast"), ("contiguous", "channels_last"), (False, True), (False, True)
    ):
        if repeatable and not record:
            continue
        name = f"{kernels} kernels, {layout}, {'recorded' if record else 'eager'}"
        name += ", deterministic" if repeatable else ""
        try:
            with deterministic(repeatable):
                variants[name] = measure(chosen, kernels, layout, record)
        except Exception as fault:  # one variant must not lose the others
            variants[name] = {"failed": f"{type(fault).__name__}: {fault}"}
        print(name, variants[name], flush=True)
    config = configured(chosen, "torch", "contiguous", record=False)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "config": config.model_dump(mode="json"),
        "milliseconds": variants,
    }
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def configured(chosen: argparse.Namespace, kernels: str, layout: str, *, record: bool) -> ExperimentConfig:
    """Return the config of a variant."""
    training = [f"training.{key}={value}" for key, value in (("memory_format", layout), ("record", record))]
    overrides = [*chosen.overrides, f"data.root={chosen.root}", *training]
    overrides += ["parallel={strategy: none}", f"training.kernels={kernels}"]
    return experiment.load_config(chosen.config, overrides)


def measure(chosen: argparse.Namespace, kernels: str, layout: str, record: bool) -> dict[str, float]:
    """Return median milliseconds: of the whole loop, undisturbed; of its parts, the device waited for after each."""
    config = configured(chosen, kernels, layout, record=record)
    device, task = choose_device(config), load_task(chosen.root)
    cases = prepare_all(task.training[:NUM_CASES], preprocessing_of(config))
    batches = build_batches(config, task, cases, device)
    model = build_model(config, task, device)
    training = build_training(config, model, batches, validation=None, hooks=[])
    model.train()
    source = chain.from_iterable(batches.epoch(number) for number in count())
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
    begin = now(device)
    for _ in range(MEASURED):
        training._train_batch(next(source))
    whole = 1000 * (now(device) - begin) / MEASURED
    return {"step": whole, **{name: statistics.median(values[WARM_UP:]) for name, values in parts.items()}}


def now(device: torch.device) -> float:
    """Return the time once the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
