"""Seconds of a core that checkouts of volseg take to prepare a task's cases and to draw those of a report, in turns.

python workflows/benchmarks/prepared_before_after.py before=DIR after=. --task DIR/Task04_Hippocampus --run RUN \
        --turns 3 --result workflows/benchmarks/results/cases_cpu_kept_grid.json

Each turn measures every checkout once, in a process of its own, by ``configs/task04_unet.yaml`` without a cache. The
digest is of all voxels and metadata that came of it: it is the same in all checkouts, or the result says so. With
``--run``, a run folder of the same task whose validation was written, its pictures are drawn too, into a copy of it.
Seconds of a core hold on a machine that does other things, somewhat inflated; those of the clock are told beside.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from volseg.monitoring.environment import environment

MEASURE = """
import gc, hashlib, json, sys, time
from pathlib import Path
from volseg.config.loading import load_config
from volseg.data.preparing import prepare_sound
from volseg.experiment.building import preprocessing_of
from volseg.experiment.cases import choose_cases
from volseg.experiment.overlays import draw_overlays
from volseg.checkpointing.folder import RunFolder
gc.collect(); gc.freeze()  # as `volseg train` does
config = load_config("configs/task04_unet.yaml", [f"data.root={sys.argv[1]}", "data.cache=none"])
chosen, steps = choose_cases(config), preprocessing_of(config)
prepare_sound(chosen.training[:2], chosen.validation[:1], chosen.task, steps)  # once: what the first case waits for
def measure(name, function):
    core, clock = time.process_time(), time.perf_counter()
    made = function()
    found[name] = {"seconds_of_a_core": time.process_time() - core, "seconds": time.perf_counter() - clock}
    return made
found, digest = {}, hashlib.sha256()
prepared = measure("prepare", lambda: prepare_sound(chosen.training, chosen.validation, chosen.task, steps))
for case in (*prepared.training, *prepared.validation):
    for field in ("image", "label", "reference"):
        if field in case:
            digest.update(case[field].as_tensor().numpy().tobytes())
            digest.update(repr(sorted((name, str(value)) for name, value in case[field].meta.items())).encode())
digest.update(repr(prepared.fingerprints).encode())
if len(sys.argv) > 2:
    folder = RunFolder(Path(sys.argv[2]))
    files = measure("draw", lambda: draw_overlays(folder, chosen.task, [*chosen.validation, *prepared.validation]))
    for file in files:
        digest.update(file.read_bytes())
print(json.dumps({"cases": len(chosen.training) + len(chosen.validation), "digest": digest.hexdigest(), **found}))
"""


def main() -> None:
    """Measure in turns, print medians and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    checkouts = dict(one.split("=", 1) for one in chosen.checkouts)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(chosen.turns):
        for name, folder in checkouts.items():
            found[name].append(measure(Path(folder).resolve(), chosen.task.resolve(), chosen.run))
    medians = {
        name: {
            part: {key: round(statistics.median(row[part][key] for row in rows), 3) for key in rows[0][part]}
            for part in ("prepare", "draw")
            if part in rows[0]
        }
        for name, rows in found.items()
    }
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "same_bytes": len({row["digest"] for rows in found.values() for row in rows}) == 1,
        "medians": medians,
        "turns": found,
        "environment": environment(),
    }
    print(json.dumps({"same_bytes": result["same_bytes"], **medians}, indent=2))
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(checkout: Path, task: Path, run: Path | None) -> dict[str, Any]:
    """Return what a process of one checkout found."""
    variables = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        more = [] if run is None else [str(shutil.copytree(run, Path(folder) / "run"))]
        command = [sys.executable, "-c", MEASURE, str(task), *more]
        done = subprocess.run(command, cwd=checkout, env=variables, check=True, capture_output=True, encoding="utf-8")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
