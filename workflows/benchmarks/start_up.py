"""Seconds until a training can begin: what it imports and compiles, and how its cases come.

python workflows/benchmarks/start_up.py imports --turns 2 --train configs/task04_cpu.yaml \
        --task DIR/Task04_Hippocampus --result workflows/benchmarks/results/unet_cpu_start_up.json
python workflows/benchmarks/start_up.py imports --config configs/task04_unet.yaml --processes 1 2 --result FILE
python workflows/benchmarks/start_up.py cases --task DIR/Task04_Hippocampus --ct 512 512 160 \
        --result workflows/benchmarks/results/cases_cpu_starting.json

``imports``: each row is a process of its own, which imports what is named and nothing else, in turns; files and
Python's bytecode were read once before. ``no bytecode`` compiles what is named anew. With ``--train`` a training
begins, without a cache of cases, and ends where it would take its first batch. With ``--config`` (and Triton) its step
is followed and the kernels compiled into an empty folder, by so many processes, for ``--gpu``. Seconds of a core (user
and system) hold on a machine that does other things; those of the clock are told beside.

``cases``: without the cache of prepared cases, with an empty one, with a full one. CTs are synthetic: noise in a body,
int16, 0.8 x 0.8 x 2.5 mm, compressed. Files were just written or read, so the system has them in memory.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

import volseg
from volseg.data.cache_folder import list_entries
from volseg.data.case_cache import CaseCache
from volseg.data.cases import Task
from volseg.data.layouts import load_task
from volseg.data.patches import PatchBatches
from volseg.data.preparing import prepare_together
from volseg.data.volume_cache import VolumeCache
from volseg.monitoring.environment import environment
from volseg.transforms.preprocessing import build_preprocessing

IMPORTS = {
    "python": "pass",
    "torch": "import torch",
    "torch and MONAI": "import torch, monai",
    "all of volseg train": "from volseg import experiment; experiment.train",
}
CACHED = ", all in the cache"
NO_BYTECODE = {"all of volseg train, no bytecode": None, "all of volseg train, no bytecode of volseg": volseg.__name__}
"""Rows of `IMPORTS` again, and the package whose modules have none; None for all packages."""
BEGIN = """
import os
from volseg.workflow.training import Training
Training.run = lambda self: os._exit(0)
from volseg.cli import main
main()
raise SystemExit("no batch was asked for")
"""
COMPILE = """
import sys
from volseg.config.loading import load_config
from volseg.experiment.compiled_kernels import compile_kernels
from volseg.experiment.network_plan import find_facts
from volseg.estimate.gpu_kinds import find_kind
config = load_config(sys.argv[1])
facts = find_facts(config, 1, 3)
print(compile_kernels(config, find_kind(sys.argv[2]), processes=int(sys.argv[3]), facts=facts).kernels)
"""
STEPS = {
    "task": [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.0, 1.0, 1.0]}, {"name": "ZScore"}],
    "ct": [
        {"name": "Orientation"},
        {"name": "Spacing", "spacing": [1.0, 1.0, 1.5]},
        {"name": "ClipZScore", "lower": -900.0, "upper": 200.0, "mean": 40.0, "std": 50.0},
    ],
}
PATCH = (96, 96, 96)


def main() -> None:
    """Measure one part, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("imports", "cases"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--train", type=Path, help="a config whose training begins")
    parser.add_argument("--task", type=Path, help="folder of a task")
    parser.add_argument("--gpu", default="H200", help="the kind that kernels are compiled for")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ct", type=int, nargs=3, metavar=("D", "H", "W"), help="sides of synthetic CTs")
    parser.add_argument("--cts", type=int, default=1)
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
    found = measure_imports(chosen) if chosen.part == "imports" else measure_cases(chosen)
    print(json.dumps(found, indent=2))
    if chosen.result:
        about = {"command": shlex.join(["python", *sys.argv]), "cores": os.cpu_count(), "load": os.getloadavg()}
        told = {**about, **found, "environment": environment()}
        chosen.result.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def measure_imports(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the medians and turns of each row."""
    commands = {name: ["-c", code] for name, code in IMPORTS.items()}
    commands |= {name: ["-c", IMPORTS["all of volseg train"]] for name in NO_BYTECODE}
    if chosen.train:
        training = ["train", str(chosen.train), "--set", f"data.root={chosen.task}", "--no-cache"]
        commands["to the first batch"] = ["-c", BEGIN, *training]
    if chosen.config:
        for count in chosen.processes:
            arguments = [str(chosen.config), chosen.gpu, str(count)]
            commands[f"kernels, {count} at a time"] = ["-c", COMPILE, *arguments]
            commands[f"kernels, {count} at a time{CACHED}"] = ["-c", COMPILE, *arguments]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(chosen.turns + 1):
        with tempfile.TemporaryDirectory() as cache:
            for name, command in commands.items():
                folder = Path(cache) / name.removesuffix(CACHED)
                if BEGIN in command:
                    command = [*command, "-o", str(folder)]
                with without_bytecode(name) as more:
                    measured = measure(command, folder, more)
                if turn:  # the first reads files and writes bytecode
                    found[name].append(measured)
    medians = {
        name: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for name, rows in found.items()
    }
    return {"medians": medians, "turns": found}


def measure_cases(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each way to begin with a task's cases and with synthetic CTs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.task:
            found["task"] = measure_starts(load_task(chosen.task), STEPS["task"], folder / "task")
        if chosen.ct:
            task = make_cts(folder, chosen.ct, chosen.cts)
            found["ct"] = {"shape": chosen.ct, **measure_starts(task, STEPS["ct"], folder / "ct")}
    return found


@contextmanager
def without_bytecode(name: str) -> Iterator[Mapping[str, str]]:
    """Yield the variables by which a row's process finds no bytecode of the packages that the row names."""
    if name not in NO_BYTECODE:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder)
        if NO_BYTECODE[name] is None:
            yield {"PYTHONPYCACHEPREFIX": str(prefix)}
            return
        package = Path(volseg.__file__).parent
        shutil.copytree(package, prefix / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        yield {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}


def measure(command: Sequence[str], cache: Path, more: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds of a process and its children, by the clock and of cores."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables = {**kept, **more, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], env=variables, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds_of_a_core": round(core, 3), "seconds": round(time.perf_counter() - begun, 3)}


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


def start(task: Task, steps: Sequence[Mapping[str, Any]], folder: Path | None) -> VolumeCache:
    """Return the bank of all cases of a task."""
    preprocessing = build_preprocessing(steps)
    cache = None if folder is None else CaseCache(folder, task, preprocessing)
    return VolumeCache(prepare_together(task.training, (), task, preprocessing, cache=cache).training)


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


if __name__ == "__main__":
    main()
