"""Seconds until a training can begin: without the cache, with an empty one, with a full one.

python workflows/benchmarks/starting.py --task DIR/Task04_Hippocampus --ct 512 512 160 --cts 2 \
        --result workflows/benchmarks/results/starting_2cores.json
python workflows/benchmarks/starting.py --ct 256 256 128 --cts 20 --processes 2 --result ...

CTs are synthetic: noise in a body, int16, 0.8 x 0.8 x 2.5 mm, compressed. ``--processes`` prepares them besides by so
many spawned processes of one thread each, which write into a cache, as threads do. Files were just written or read, so
the system has them in memory. What else the machine did shows in the load.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch

from volseg.data.bank import CaseBank
from volseg.data.cache_folder import list_entries, remove_entries
from volseg.data.case_cache import CaseCache
from volseg.data.cases import Task
from volseg.data.checks import read_case
from volseg.data.layouts import load_task
from volseg.data.patches import PatchBatches
from volseg.data.preparing import prepare_sound
from volseg.data.preprocessed import prepare
from volseg.monitoring.environment import environment
from volseg.transforms.preprocessing import build_preprocessing

STEPS = {
    "task": [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.0, 1.0, 1.0]}, {"name": "ZScore"}],
    "ct": [
        {"name": "Orientation"},
        {"name": "Spacing", "spacing": [1.0, 1.0, 1.5]},
        {"name": "ClipZScore", "lower": -900.0, "upper": 200.0, "mean": 40.0, "std": 50.0},
    ],
}
PATCH = (96, 96, 96)


def make_cts(folder: Path, shape: Sequence[int], count: int) -> Task:
    """Write CTs with labels, and describe them."""
    axes = np.meshgrid(*[np.linspace(-1, 1, side, dtype=np.float32) for side in shape], indexing="ij")
    radius = sum(axis * axis for axis in axes)
    label = ((axes[0] - 0.2) ** 2 + axes[1] ** 2 + axes[2] ** 2 < 0.1).astype(np.uint8)
    label[(axes[0] + 0.3) ** 2 + axes[1] ** 2 + axes[2] ** 2 < 0.02] = 2
    affine = np.diag([-0.8, -0.8, 2.5, 1.0])
    cases = []
    for number in range(count):
        noise = np.random.default_rng(number).normal(0, 15, shape).astype(np.float32)
        voxels = np.where(radius < 0.8, 40, -1000) + noise + 60 * (label > 0)
        case = {"case": f"ct_{number}", "image": folder / f"ct_{number}.nii.gz", "label": folder / f"l_{number}.nii.gz"}
        for field, values in (("image", voxels.round().astype(np.int16)), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(values, affine), case[field])
        cases.append(case)
    labels = {0: "background", 1: "organ", 2: "lesion"}
    return Task(name="CT", root=folder, modalities=("CT",), labels=labels, training=tuple(cases), test=())


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and result."""
    begin = time.perf_counter()
    result = function()
    return round(time.perf_counter() - begin, 3), result


def start(task: Task, steps: Sequence[Mapping[str, Any]], folder: Path | None) -> CaseBank:
    """Return the bank of all cases of a task."""
    preprocessing = build_preprocessing(steps)
    cache = None if folder is None else CaseCache(folder, task, preprocessing)
    return CaseBank(prepare_sound(task.training, (), task, preprocessing, cache=cache).training)


def measure_starts(task: Task, steps: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return seconds of all ways to begin, and of an epoch of patches from each."""
    found: dict[str, Any] = {"cases": len(task.training)}
    for name, where in (("without", None), ("cold", folder), ("warm", folder)):
        found[f"{name}_seconds"], bank = timed(partial(start, task, steps, where))
        if name != "cold":
            side = [min(patch, int(most)) for patch, most in zip(PATCH, bank.shapes.amin(0), strict=True)]
            batches = PatchBatches(bank, side, batch_size=2, iterations=50)
            list(batches.epoch(0))
            found[f"{name}_ms_per_patch"] = round(10 * timed(partial(count, batches))[0], 3)
    found["kept_bytes"] = sum(entry.size for entry in list_entries(folder))
    return found


def count(batches: PatchBatches) -> int:
    """Cut an epoch's patches, and let them go."""
    return sum(1 for _ in batches.epoch(1))


def measure_parts(task: Task, folder: Path) -> dict[str, float]:
    """Return seconds of each part of one CT's way into the cache, in one thread."""
    case, preprocessing = task.training[0], build_preprocessing(STEPS["ct"])
    torch.set_num_threads(1)
    parts: dict[str, float] = {}
    parts["digest of the files"], key = timed(lambda: CaseCache(folder, task, preprocessing).key_of(case))
    parts["read and check"], checked = timed(lambda: read_case(case, task))
    moved = checked.case
    for step in preprocessing.transforms:
        parts[type(step).__name__], moved = timed(partial(step, moved))
    prepared = prepare(case, preprocessing, keep_reference=True, task=task)
    cache = CaseCache(folder, task, preprocessing)
    found = {"remarks": [], "digest": checked.digest, "fingerprint": checked.fingerprint}
    parts["store"], _ = timed(lambda: cache.store(key, case, prepared, found))
    return parts


def prepare_one(task: Task, folder: Path, number: int) -> None:
    """Prepare one case into a cache, in a process."""
    torch.set_num_threads(1)
    part = prepare_sound(
        [task.training[number]],
        (),
        task,
        preprocessing := build_preprocessing(STEPS["ct"]),
        cache=CaseCache(folder, task, preprocessing),
        workers=1,
    )
    del part


def measure_processes(task: Task, folder: Path, processes: int) -> dict[str, Any]:
    """Return seconds by threads and by spawned processes, as many of each, from empty caches."""
    preprocessing = build_preprocessing(STEPS["ct"])
    threads, _ = timed(
        lambda: prepare_sound(
            task.training, (), task, preprocessing, cache=CaseCache(folder, task, preprocessing), workers=processes
        )
    )
    remove_entries(folder)

    def spawn() -> None:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(partial(prepare_one, task, folder), range(len(task.training))))

    return {"workers": processes, "threads_seconds": threads, "processes_seconds": timed(spawn)[0]}


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, help="folder of a task")
    parser.add_argument("--ct", type=int, nargs=3, metavar=("D", "H", "W"), help="sides of synthetic CTs")
    parser.add_argument("--cts", type=int, default=1)
    parser.add_argument("--processes", type=int, help="compare so many processes with as many threads")
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.task:
            result["task"] = measure_starts(load_task(chosen.task), STEPS["task"], folder / "task")
        if chosen.ct:
            task = make_cts(folder, chosen.ct, chosen.cts)
            result["ct"] = {"shape": chosen.ct, "parts": measure_parts(task, folder / "parts")}
            if chosen.processes:
                result["ct"]["pools"] = measure_processes(task, folder / "pools", chosen.processes)
            else:
                result["ct"] |= measure_starts(task, STEPS["ct"], folder / "ct")
    result["load"] = os.getloadavg()
    result["environment"] = environment()
    print(json.dumps({name: value for name, value in result.items() if name != "environment"}, indent=2))
    if chosen.result:
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
