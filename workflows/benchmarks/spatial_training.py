"""The same training on one GPU and on several, one process each: the curves beside each other, as JSON.

python workflows/benchmarks/spatial_training.py configs/task04_highres.yaml DIR/Task04_Hippocampus \
        --gpus 1 2 --set training.epochs=3 --result workflows/benchmarks/results/dynunet_h200x2_task04_highres_bf16.json
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from volseg.monitoring.environment import environment
from volseg.workflow import load_checkpoint


def main() -> None:
    """Train once per number of GPUs, which may be named twice, and compare every epoch's loss with the first run's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/spatial_training"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()

    result: dict = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "runs": []}
    for number, gpus in enumerate(chosen.gpus):
        result["runs"].append(trained(chosen, gpus, chosen.runs / f"{chosen.config.stem}_{number}_on_{gpus}"))
        chosen.result.parent.mkdir(parents=True, exist_ok=True)
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(result["runs"][-1]), flush=True)
    first, *others = result["runs"]
    for other in others:
        pairs = list(zip(first["loss"], other["loss"], strict=True))
        other["largest_relative_difference_of_loss"] = max(abs(a - b) / abs(a) for a, b in pairs)
        print(other["gpus"], "GPUs:", other["largest_relative_difference_of_loss"])
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def trained(chosen: argparse.Namespace, gpus: int, folder: Path) -> dict:
    """Run ``volseg train`` and return its curve."""
    command = [sys.executable, "-m", "volseg", "train", str(chosen.config), "--gpus", str(gpus), "-o", str(folder)]
    for override in (*chosen.overrides, f"data.root={chosen.root}"):
        command += ["--set", override]
    begin = time.perf_counter()
    done = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    refused = [line for line in done.stderr.splitlines() if "cannot be recorded" in line]
    history = load_checkpoint(folder / "checkpoints" / "latest.pt").history
    return {
        "gpus": gpus,
        "seconds": time.perf_counter() - begin,
        "recorded": torch.cuda.is_available() and "training.record=false" not in chosen.overrides and not refused,
        "why_not_recorded": refused[:1],
        "seconds_per_epoch": [record.seconds for record in history],
        "seconds_waited": [record.seconds_waited for record in history],
        "peak_gib": (history[-1].peak_bytes or 0) / 2**30,
        "loss": [record.losses["loss"] for record in history],
        "mean_dice": [record.score for record in history],
    }


if __name__ == "__main__":
    main()
