"""Seconds of a core that a command spends until it can begin: imports, and the kernels of a config.

python workflows/benchmarks/start_up.py --turns 5 --result workflows/benchmarks/results/imports_cpu_start_up.json
python workflows/benchmarks/start_up.py --turns 3 --config configs/task04_unet.yaml --processes 1 2 --result FILE
python workflows/benchmarks/start_up.py --turns 2 --train configs/task04_cpu.yaml --task DIR/Task04_Hippocampus \
        --result FILE

Each row is a process of its own, which imports what is named and nothing else, in turns; files and Python's bytecode
were read once before. ``collecting`` imports with Python's garbage collector on, as they were before; ``no bytecode``
compiles what is named anew. With ``--train`` a training begins, without a cache of cases, and ends where it would take
its first batch. With ``--config`` (and Triton) its step is followed and the kernels compiled into an empty folder, by
so many processes, for ``--gpu``.
Seconds of a core (user and system) hold on a machine that does other things; those of the clock are told beside.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import volseg
from volseg.monitoring.environment import environment

IMPORTS = {
    "python": "pass",
    "torch": "import torch",
    "torch and MONAI": "import torch, monai",
    "all of volseg train": "from volseg import experiment; experiment.train",
    "all of volseg train, collecting": "import volseg.experiment.training, volseg.experiment",
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
from volseg.experiment.data_facts import find_facts
from volseg.estimate.gpu_kinds import find_kind
config = load_config(sys.argv[1])
facts = find_facts(config, 1, 3)
print(compile_kernels(config, find_kind(sys.argv[2]), processes=int(sys.argv[3]), facts=facts).kernels)
"""


def main() -> None:
    """Measure in turns, print medians and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--train", type=Path, help="a config whose training begins")
    parser.add_argument("--task", type=Path, help="its data set")
    parser.add_argument("--gpu", default="H200", help="the kind that kernels are compiled for")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
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
    rows = {
        name: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for name, rows in found.items()
    }
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "medians": rows,
        "turns": found,
        "environment": environment(),
    }
    print(json.dumps(rows, indent=2))
    if chosen.result:
        chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    main()
