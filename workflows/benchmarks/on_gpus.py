"""Measurements that take GPUs, one after the other, within so many seconds: what a release is measured by.

    python workflows/benchmarks/on_gpus.py --list
    python workflows/benchmarks/on_gpus.py --prepare --output runs/gpu      # what needs no GPU, in minutes
    python workflows/benchmarks/on_gpus.py --gpus 1 --seconds 560 --task DIR/Task04_Hippocampus --output runs/gpu
    python workflows/benchmarks/on_gpus.py --only networks convolutions --seconds 590 --output runs/gpu

The kernels' tests come first: no figure of a kernel that is wrong is worth its time. One measurement's failure ends no
other. None begins that would not end in time by what it is expected to take, and each is stopped at twice that.
Results, and what each printed, lie in ``--output``, where a later call finds what is done (``--again`` measures it
anew). Figures that are published move from there to ``workflows/benchmarks/results``, by the name that ``--list``
shows.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Measurement:
    """One command, and what it asks for.

    Parameters
    ----------
    name : str
    gpus : int
        That it takes.
    seconds : int
        It is expected to take.
    command : str
        Behind ``python`` in the repository's root: a script of this folder, or a module (``-m``). ``{result}`` is the
        file that it writes, ``{task}`` is Task04's folder.
    result : str
        That file's name, as it would be published; empty where there is none.
    before : str
        A command that needs no GPU, whose output the command takes as ``{prepared}``; it takes minutes.
    """

    name: str
    gpus: int
    seconds: int
    command: str
    result: str = ""
    before: str = ""

    def fill(self, command: str, folder: Path, task: Path | None) -> list[str]:
        """Return a command's words."""
        places = {"result": folder / self.result, "task": task, "prepared": folder / f"{self.file_name}.rows.json"}
        words = [word if "{" not in word or '"' in word else word.format(**places) for word in shlex.split(command)]
        if words[0] != "-m":
            words[0] = f"workflows/benchmarks/{words[0]}"
        return [sys.executable, *words]

    @property
    def file_name(self) -> str:
        """The name, for a file."""
        return self.name.replace(" ", "_")


def _list_tiled() -> str:
    common = {"kind": "spatial", "gpus": 1, "steps": 5}
    rows = [
        {**common, "part": f"{net} {checkpoint}", "net": net, "shape": [160, 320, 320], "checkpoint": checkpoint}
        for net in ("dynunet", "vnet")
        for checkpoint in ("all", "tiled")
    ]
    huge = {"part": "512^3", "net": "dynunet", "shape": [512] * 3, "checkpoint": "tiled", "steps": 2, "warm": 1}
    return json.dumps([*rows, {**common, **huge}])


_ON_TWO = "networks.py --gpus 2 --seconds 520 --result {result}"
_ACCURACY = "plan_accuracy.py --skip-done --result {result}"

MEASUREMENTS = (
    # Each test's name as it ends: a run that is cut off tells which failed.
    Measurement("tests", 1, 240, "-m pytest -v -n 8 --dist load -m gpu -p no:cacheprovider"),
    Measurement("tests of several", 2, 90, "-m pytest -q -m multi_gpu -p no:cacheprovider"),
    Measurement(
        "tiles",
        1,
        100,
        f"spatial.py --rows {shlex.quote(_list_tiled())} --limit 60 --output {{result}}",
        "dynunet_vnet_h200_tiles.json",
    ),
    Measurement(
        "convolutions",
        1,
        60,
        "kernel_timings.py convolutions --seconds 36 --result {result}",
        "convolutions_h200_random.json",
    ),
    Measurement("norms", 1, 60, "kernel_timings.py norms --result {result}", "norms_h200_reductions.json"),
    Measurement(
        "networks",
        1,
        560,
        "networks.py --gpus 1 --seconds 520 --ahead 6 --turns 3 --result {result}",
        "networks_h200_steps.json",
    ),
    Measurement(
        "task04",
        1,
        230,
        "task04.py configs/task04_short.yaml {task} --folds 0 1 2 3 4 --cores 2 --cold --result {result}",
        "dynunet_h200_task04_short_folds.json",
    ),
    Measurement(
        "forecasts",
        1,
        300,
        "plan_accuracy.py --skip-done --rows {prepared} --gpus 1 --seconds 270 --result {result}",
        "networks_h200_plan_accuracy.json",
        "plan_accuracy.py --one-gpu --forecast",
    ),
    Measurement(
        "random sizes on one",
        1,
        260,
        "plan_accuracy.py --skip-done --rows {prepared} --gpus 1 --seconds 240 --result {result}",
        "networks_h200_random_auto.json",
        "plan_accuracy.py --one-gpu --random 50 --limit-gib 16 --seed 1",
    ),
    Measurement(
        "largest volumes on one",
        1,
        130,
        "largest_volumes.py --rows {prepared} --gpus 1 --seconds 110 --result {result}",
        "networks_h200_largest_volumes.json",
        "largest_volumes.py --one-gpu --forecast",
    ),
    Measurement("networks on two", 2, 560, _ON_TWO, "networks_h200x2_steps.json"),
    Measurement("large networks on two", 2, 560, f"{_ON_TWO} --sides 160 320 320", "networks_h200x2_steps.json"),
    Measurement(
        "forecasts of pipelines",
        2,
        200,
        f"{_ACCURACY} --only pipeline2 --seconds 170",
        "networks_h200x2_plan_accuracy_later.json",
    ),
    Measurement(
        "forecasts of slabs",
        2,
        200,
        f"{_ACCURACY} --only spatial2 --seconds 170",
        "networks_h200x2_plan_accuracy_later.json",
    ),
    Measurement(
        "random sizes",
        2,
        400,
        "plan_accuracy.py --rows {prepared} --seconds 370 --result {result}",
        "networks_h200x2_random_auto_later.json",
        "plan_accuracy.py --random 50 --limit-gib 16 --seed 1",
    ),
    Measurement(
        "largest volumes",
        2,
        400,
        "largest_volumes.py --rows {prepared} --seconds 370 --result {result}",
        "networks_h200x2_largest_volumes_found.json",
        "largest_volumes.py --forecast",
    ),
)


def choose(
    gpus: int, seconds: float, only: list[str], done: set[str] | frozenset[str] = frozenset()
) -> list[Measurement]:
    """Return the measurements that fit on so many GPUs into so many seconds, in order."""
    if unknown := set(only) - {one.name for one in MEASUREMENTS}:
        raise SystemExit(f"there is no measurement {sorted(unknown)}; --list names them")
    chosen = []
    for one in MEASUREMENTS:
        wanted = one.name in only if only else True
        if wanted and one.name not in done and one.gpus <= gpus and one.seconds <= seconds:
            chosen.append(one)
            seconds -= one.seconds
    return chosen


def run(one: Measurement, folder: Path, task: Path | None, seconds: float) -> dict[str, object]:
    """Run one, with what it prints in a file; stop it, and what it started, after so many seconds."""
    begin = time.perf_counter()
    words = one.fill(one.command, folder, task)
    with open(folder / f"{one.file_name}.log", "w", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(words)}\n")
        log.flush()
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"status": status, "seconds": round(time.perf_counter() - begin, 1)}


def prepare(one: Measurement, folder: Path) -> None:
    """Write what a measurement needs and no GPU makes, unless it is there."""
    words = one.fill(one.before, folder, None)
    path = folder / f"{one.file_name}.rows.json"
    if not path.exists():
        print(f"{one.name}: {shlex.join(words)}", flush=True)
        path.write_bytes(subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    """Run what fits, and tell of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the measurements")
    parser.add_argument("--prepare", action="store_true", help="write what measurements need and no GPU makes, and end")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default all that are visible")
    parser.add_argument("--seconds", type=float, default=590.0, help="in all")
    parser.add_argument("--task", type=Path, help="Task04's folder")
    parser.add_argument("--again", action="store_true", help="measure anew what the folder has")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    chosen = parser.parse_args()
    if chosen.list:
        for one in MEASUREMENTS:
            print(f"{one.name:24} {one.gpus} GPU{'s'[: one.gpus - 1]:1} {one.seconds:4} s  {one.result}")
        return
    folder = chosen.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.prepare:
        for one in choose(max(one.gpus for one in MEASUREMENTS), float("inf"), chosen.only):
            if one.before:
                prepare(one, folder)
        return
    table = folder / "measured.json"
    told: dict[str, dict[str, object]] = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    done = set() if chosen.again else {name for name, found in told.items() if found["status"] == 0}
    end = time.monotonic() + chosen.seconds
    for one in choose(chosen.gpus, chosen.seconds, chosen.only, done):
        left = end - time.monotonic()
        if one.seconds > left:
            print(f"{one.name}: left out, {left:.0f} s are left and it takes {one.seconds}", flush=True)
            continue
        if "{task}" in one.command and chosen.task is None:
            print(f"{one.name}: left out, it needs --task", flush=True)
            continue
        if one.before and not (folder / f"{one.file_name}.rows.json").exists():
            print(f"{one.name}: left out, --prepare was not called", flush=True)
            continue
        told[one.name] = run(one, folder, chosen.task and chosen.task.resolve(), min(2 * one.seconds, left))
        print(f"{one.name}: {told[one.name]}", flush=True)
        table.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
