"""The same training on different numbers of GPUs and meshes, one process each: speed, curves and final bits, as JSON.

python workflows/benchmarks/several_gpus.py configs/task04_unet.yaml DIR/Task04_Hippocampus --set training.epochs=3 \
        --run 1 --run "2 parallel.data=2" --run "2 parallel.spatial=2" --rounds 2 --result FILE

A run is a number of GPUs and what the config says otherwise. With several rounds the runs take turns, and the median
counts. Rates leave out each training's first epoch, in which kernels are chosen and steps recorded.
"""

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from results import make_parser, write_result

from volseg.commands import run_module
from volseg.config.loading import load_config
from volseg.workflow import load_checkpoint


def main() -> None:
    """Train each run in turns; compare rates, every epoch's loss and the final bits with the first run's."""
    parser = make_parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--run", dest="runs", action="append", required=True, metavar="GPUS [KEY=VALUE ...]")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path("runs/several_gpus"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()

    trained: dict[str, list[dict[str, Any]]] = {run: [] for run in chosen.runs}
    for number in range(chosen.rounds):
        for place, run in enumerate(chosen.runs):
            trained[run].append(train(chosen, run, chosen.folder / f"{chosen.config.stem}_{number}_{place}"))
            print(run, json.dumps(trained[run][-1]), flush=True)
            write_result(chosen.result, rows=list(compare(trained)), rounds=trained)
    print(json.dumps(list(compare(trained)), indent=1))


def train(chosen: argparse.Namespace, run: str, folder: Path) -> dict[str, Any]:
    """Run ``volseg train`` and return its curve."""
    gpus, *own = shlex.split(run)
    command = run_module("volseg", "train", str(chosen.config), "--gpus", gpus, "-o", str(folder))
    overrides = [*chosen.overrides, *own, f"data.root={chosen.root}"]
    for override in overrides:
        command += ["--set", override]
    begin = time.perf_counter()
    done = subprocess.run(command, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    state = load_checkpoint(folder / "checkpoints" / "latest.pt")
    digest = hashlib.sha256()
    for name, tensor in sorted(state.model.items()):
        digest.update(name.encode() + tensor.cpu().contiguous().flatten().numpy().tobytes())
    config = load_config(chosen.config, overrides)
    later = [record.seconds for record in state.history[1:]]
    return {
        "seconds": time.perf_counter() - begin,
        "told": [line for line in done.stderr.splitlines() if "replica" in line or "recorded" in line],
        "seconds_per_epoch": [record.seconds for record in state.history],
        "seconds_waited": [record.seconds_waited for record in state.history],
        "steps_per_second": config.training.iterations / statistics.median(later) if later else None,
        "peak_gib": (state.history[-1].peak_bytes or 0) / 2**30,
        "loss": [record.losses["loss"] for record in state.history],
        "mean_dice": [record.score for record in state.history],
        "sha256_of_weights": digest.hexdigest(),
    }


def compare(trained: dict[str, list[dict[str, Any]]]) -> Any:
    """Yield a row for each run: its median rate, and what differs from the first run."""
    first = next(iter(trained.values()))[0]
    for run, rounds in trained.items():
        rates = [one["steps_per_second"] for one in rounds if one["steps_per_second"]]
        if not rounds:
            continue
        yield {
            "run": run,
            "steps_per_second": statistics.median(rates) if rates else None,
            "times_the_first": statistics.median(rates) / first["steps_per_second"] if rates else None,
            "largest_relative_difference_of_loss": max(
                abs(mine - other) / abs(other) for mine, other in zip(rounds[0]["loss"], first["loss"], strict=True)
            ),
            "same_bits_as_the_first": rounds[0]["sha256_of_weights"] == first["sha256_of_weights"],
            "same_bits_every_round": len({one["sha256_of_weights"] for one in rounds}) == 1,
            "mean_dice": rounds[0]["mean_dice"],
        }


if __name__ == "__main__":
    main()
