"""Is anything compiled that was not compiled beforehand, and what does a first run take? Needs a GPU and Triton.

python workflows/benchmarks/compiled_beforehand.py configs/task04_unet.yaml DIR/Task04_Hippocampus --cores 2 \
        --result workflows/benchmarks/results/dynunet_h200_compiled_beforehand.json

Three short trainings (two epochs of 20 steps, no validation but the last), each a process of its own: with an empty
cache and kernels compiled beside (what `volseg train` does), with an empty cache and without (``TRITON_CACHE_MANAGER``
is left alone; the note that all is compiled is written first), and with the cache of the first. What the first run's
copy compiled stands in its note; what is in the cache besides was compiled by the training itself: kernels of the step
there are none, or they are named.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cores import first_cores

from volseg.commands import run_module

SHORT = ["training.epochs=2", "training.iterations=20", "training.validate_every=null", "data.cache=none"]


def main() -> None:
    """Train three times, and say what each compiled and what its seconds went by with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    os.sched_setaffinity(0, first_cores(chosen.cores, 0))
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "cores": chosen.cores}
    with tempfile.TemporaryDirectory() as folder:
        beside, alone = Path(folder) / "beside", Path(folder) / "alone"
        result["beside"] = train(chosen, Path(folder) / "run_1", beside)
        alone.mkdir()
        for note in beside.glob("volseg_*.json"):
            (alone / note.name).write_bytes(note.read_bytes())  # so that no copy is made
        result["alone"] = train(chosen, Path(folder) / "run_2", alone)
        result["warm"] = train(chosen, Path(folder) / "run_3", beside)
        step, all_kernels = list_kernels(alone), list_kernels(beside)
        result["compiled_alone"] = step
        result["compiled_beside_only"] = {
            name: count for name, count in all_kernels.items() if count > step.get(name, 0)
        }
    print(json.dumps(result, indent=2))
    chosen.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def train(chosen: argparse.Namespace, run: Path, cache: Path) -> dict[str, Any]:
    """Train shortly; return the seconds by part, what the note says, and how much was compiled after it."""
    settings = [*SHORT, f"data.root={chosen.root}", f"output={run}"]
    arguments = [part for each in settings for part in ("--set", each)]
    begun = time.perf_counter()
    subprocess.run(
        run_module("volseg", "train", str(chosen.config), *arguments, "--quiet"),
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        check=True,
    )
    seconds = time.perf_counter() - begun
    notes = sorted(cache.glob("volseg_*.json"))
    noted = json.loads(notes[0].read_text(encoding="utf-8")) if notes else None
    after = [] if not notes else [path for path in metadata(cache) if path.stat().st_mtime > notes[0].stat().st_mtime]
    parts = json.loads((run / "times.json").read_text(encoding="utf-8"))["parts"][-1]["spans"]
    return {
        "seconds": round(seconds, 2),
        "seconds_by_part": {name: round(value, 2) for name, value in parts.items()},
        "noted": noted,
        "compiled_after_the_note": sorted(path.stem for path in after),
    }


def metadata(cache: Path) -> list[Path]:
    """Return a file per kernel of Triton's cache."""
    return [path for path in cache.glob("*/*.json") if not path.name.startswith("__grp__")]


def list_kernels(cache: Path) -> Mapping[str, int]:
    """Return how many binaries of each kernel there are."""
    names = sorted(path.stem for path in metadata(cache))
    return {name: names.count(name) for name in dict.fromkeys(names)}


if __name__ == "__main__":
    main()
