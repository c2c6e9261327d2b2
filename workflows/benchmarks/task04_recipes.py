"""Dice and seconds of short Task04 recipes: several at a time for their Dice, then the best alone for their seconds.

python workflows/benchmarks/task04_recipes.py configs/task04_unet.yaml DIR/Task04_Hippocampus --together 6 --alone 3 \
        --limit 520 --result workflows/benchmarks/results/dynunet_h200_task04_short_recipes.json

Every recipe is `volseg train` in a process of its own, on fold ``--fold``. Those that run together share a GPU: their
Dice is what it would be alone, their seconds are not. The ``--alone`` recipes of the highest Dice, and those that
``--time`` names, are then run one after the other on ``--cores`` cores, cold (an empty cache of Triton's, no cache of
prepared cases) and warm. What is not reached in ``--limit`` seconds is left out, and said.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cores import first_cores

from volseg.commands import run_module

QUICK = ["training.validate_every=null", "evaluation.distances=false", "logging.loggers=[]", "training.ema=0.998"]
DECAY = "optimizer.weight_decay=0.1"


def length(steps: int) -> list[str]:
    """Return the overrides of a training of so many steps, in ten epochs: a size changes between two of them."""
    return ["training.epochs=10", f"training.iterations={steps // 10}"]


def small(until: float, then: float | None = None) -> str:
    """Return the override for patches that are small until this part of a training, and middling until the next."""
    middling = f", {{until: {then}, size: [32, 48, 32]}}" if then else ""
    return f"patch.growth=[{{until: {until}, size: [24, 32, 24]}}{middling}]"


HALF = small(0.5)

RECIPES: Mapping[str, Sequence[str]] = {
    "as it is": ["evaluation.distances=false"],
    "3000 steps": [*QUICK, *length(3000)],
    "3000 steps, rate 0.004": [*QUICK, *length(3000), "optimizer.lr=4.0e-3"],
    "3000 steps, one cycle": [*QUICK, *length(3000), "schedule.warmup=0.3", "optimizer.lr=4.0e-3"],
    "3000 steps, half small": [*QUICK, *length(3000), HALF],
    "3000 steps, half small, rate 0.004": [*QUICK, *length(3000), HALF, "optimizer.lr=4.0e-3"],
    "3000 steps, half small, floor 0.3": [*QUICK, *length(3000), HALF, "schedule.floor=0.3"],
    "3000 steps, half small, decay 0.1": [*QUICK, *length(3000), HALF, DECAY],
    "3000 steps, half small, decay 0.2": [*QUICK, *length(3000), HALF, "optimizer.weight_decay=0.2"],
    "3000 steps, half small, one head": [*QUICK, *length(3000), HALF, "network.deep_supervision=false"],
    "3000 steps, half small, elastic": [*QUICK, *length(3000), HALF, "augmentation.elastic.probability=0.3"],
    "3000 steps, 0.7 small, decay 0.1": [*QUICK, *length(3000), small(0.7), DECAY],
    "3000 steps, three sizes, decay 0.1": [*QUICK, *length(3000), small(0.4, 0.8), DECAY],
    "3000 steps, three sizes": [*QUICK, *length(3000), small(0.3, 0.6)],
    "2500 steps, half small, decay 0.1": [*QUICK, *length(2500), HALF, DECAY],
    "2500 steps, 0.7 small, decay 0.1": [*QUICK, *length(2500), small(0.7), DECAY],
    "4000 steps, half small": [*QUICK, *length(4000), HALF],
    "4000 steps, half small, decay 0.1": [*QUICK, *length(4000), HALF, DECAY],
    "4000 steps, three sizes": [*QUICK, *length(4000), small(0.3, 0.6)],
    "4000 steps of 32 x 48 x 32": [*QUICK, *length(4000), "patch.size=[32, 48, 32]"],
    "4000 steps, decay 0.1": [*QUICK, *length(4000), DECAY],
    "2500 steps of 12, half small": [*QUICK, *length(2500), HALF, "patch.batch=12", "optimizer.lr=4.0e-3"],
    "2000 steps": [*QUICK, *length(2000)],
    "6000 steps of 4, half small": [*QUICK, *length(6000), HALF, "patch.batch=4", "optimizer.lr=2.0e-3"],
}


def main() -> None:
    """Run the recipes, and write what they came to after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of all")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES), metavar="NAME")
    parser.add_argument("--together", type=int, default=6, help="at a time, for their Dice")
    parser.add_argument("--alone", type=int, default=3, help="how many of the best are timed")
    parser.add_argument(
        "--time", nargs="*", default=[], choices=list(RECIPES), metavar="NAME", help="timed in any case"
    )
    parser.add_argument("--cores", type=int, default=2, help="of a recipe that is timed")
    parser.add_argument("--limit", type=float, default=520.0, help="seconds after which no recipe begins")
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.limit
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "cores": os.cpu_count(), "together": {}}

    def keep(part: str, name: str, found: Mapping[str, Any]) -> None:
        result.setdefault(part, {})[name] = found
        print(f"{part:8} {name:40} {json.dumps(found)}", flush=True)
        chosen.result.parent.mkdir(parents=True, exist_ok=True)
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def try_recipe(name: str) -> None:
        if time.monotonic() < end:
            keep("together", name, run(chosen, name, "together", None))

    with ThreadPoolExecutor(chosen.together) as lanes:
        list(lanes.map(try_recipe, chosen.recipes))
    dice = {name: found["mean_dice"] for name, found in result["together"].items() if found["mean_dice"] is not None}
    best = sorted(dice, key=lambda name: -dice[name])[: chosen.alone]
    os.sched_setaffinity(0, first_cores(chosen.cores, 0))
    for name in dict.fromkeys([*chosen.time, *best]):
        with tempfile.TemporaryDirectory(prefix="triton_") as cache:
            for part in ("cold", "warm"):
                if time.monotonic() < end:
                    keep(part, name, run(chosen, name, part, cache))
    left = [name for name in chosen.recipes if name not in result["together"]]
    print(f"not reached: {left or 'none'}")


def run(chosen: argparse.Namespace, name: str, part: str, cache: str | None) -> dict[str, Any]:
    """Train one recipe as a user would; return its Dice and where its seconds went."""
    folder = chosen.runs / part / name.replace(" ", "_").replace(",", "")
    own = [f"data.root={chosen.root}", f"split.fold={chosen.fold}", f"output={folder}"]
    own += ["data.cache=none"] if part == "cold" else [f"data.cache={chosen.runs / 'cases'}"]
    settings = [item for value in [*RECIPES[name], *own, *chosen.overrides] for item in ("--set", value)]
    command = run_module("volseg", "train", str(chosen.config), *settings, "--quiet")
    environment = {**os.environ, **({} if cache is None else {"TRITON_CACHE_DIR": cache})}
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - begun, 2), "mean_dice": None}
    if done.returncode:
        return {**found, "failed": done.stderr.strip().splitlines()[-1:]}
    return {**found, **read_run(folder)}


def read_run(folder: Path) -> dict[str, Any]:
    """Return what a run left in its folder."""
    from volseg.experiment import RunFolder
    from volseg.reporting.needed import add_spans

    run_folder = RunFolder(folder)
    summary = json.loads((run_folder.validation / "summary.json").read_text(encoding="utf-8"))
    spans = {name: round(seconds, 2) for name, seconds in add_spans(run_folder.times()).items()}
    return {"mean_dice": summary["foreground_mean"]["Dice"], "seconds_by_part": spans}


if __name__ == "__main__":
    main()
