"""Dice, Jaccard, HD95 and ASD on the left atrium benchmark: networks, numbers of labelled cases, and seeds, as JSON.

python workflows/benchmarks/left_atrium_scores.py --data 80=DIR/LeftAtrium 16=DIR/LeftAtrium16 --networks vnet unet \
        --seeds 0 1 2 3 4 --gpus 4 --result workflows/benchmarks/results/networks_h200_left_atrium.json

``datasets/left_atrium.py`` makes the two data sets. A row is one training by ``configs/left_atrium_NETWORK.yaml`` on
all labelled cases, without validation, and its prediction of the 20 test cases. Rows of ``--result`` stay. A row that
has label maps of all test cases in ``--runs`` is scored without a training, so that a command that was stopped goes on.

The scores follow ``code/test_util.py`` of the repository ``yulequan/UA-MT``, which calls medpy: surfaces are voxels
that an erosion by six neighbours removes, distances are in voxels, HD95 is the 95th percentile over both directions
together, ASD the mean over the predicted surface. ASSD (mm) of ``volseg evaluate`` averages both directions.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.metrics.utils import get_mask_edges, get_surface_distance
from numpy.typing import NDArray
from results import make_parser, read_result, write_result
from scipy.stats import t
from workers import share_gpus

from volseg.commands import run_module
from volseg.data.readers import read_label

CONFIGS = Path(__file__).parents[2] / "configs"
ITERATIONS = {80: 10_000, 16: 5_000}
"""Batches of a training by its number of labelled cases."""
PER_EPOCH = 250
METRICS = ("dice", "jaccard", "hd95", "asd")

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    network: str
    labelled: int
    data: str
    seed: int

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.network}_{self.labelled}_{self.seed}"


def score(prediction: Mask, reference: Mask) -> dict[str, float]:
    """Return the four scores of a case as UA-MT's test code computes them; zeros where nothing is predicted."""
    if not prediction.any():
        return dict.fromkeys(METRICS, 0.0)
    both = np.count_nonzero(prediction & reference)
    sizes = np.count_nonzero(prediction) + np.count_nonzero(reference)
    edges, other = get_mask_edges(prediction, reference)
    there, back = get_surface_distance(edges, other), get_surface_distance(other, edges)
    return {
        "dice": 2 * both / sizes,
        "jaccard": both / (sizes - both),
        "hd95": float(np.percentile(np.concatenate([there, back]), 95)),
        "asd": float(there.mean()),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean over seeds, and its 95 % interval by Student's t, of each network and number of labelled cases."""
    found = []
    for network, labelled in dict.fromkeys((row["network"], row["labelled"]) for row in rows):
        own = [row for row in rows if (row["network"], row["labelled"]) == (network, labelled)]
        entry: dict[str, Any] = {"network": network, "labelled": labelled, "seeds": len(own)}
        for metric in METRICS:
            means = np.array([np.mean([case[metric] for case in row["cases"].values()]) for row in own])
            half = t.ppf(0.975, len(own) - 1) * means.std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else None
            entry[metric] = {"mean": float(means.mean()), "half_interval": None if half is None else float(half)}
        found.append(entry)
    return found


def main() -> None:
    """Train, predict and score; write the result after each row."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", nargs="+", required=True, metavar="LABELLED=FOLDER")
    parser.add_argument("--networks", nargs="+", default=["vnet", "unet"], choices=["vnet", "unet"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--gpus", type=int, default=1, help="rows at a time, each on a GPU of its own")
    parser.add_argument("--each", type=int, default=1, help="GPUs that one training shares")
    parser.add_argument("--runs", type=Path, default=Path("runs/left_atrium"), help="where the run folders go")
    parser.add_argument("--result", type=Path, required=True, help="JSON file")
    chosen = parser.parse_args()
    folders = {int(labelled): folder for labelled, _, folder in (item.partition("=") for item in chosen.data)}
    jobs = [
        Job(network=network, labelled=labelled, data=folder, seed=seed)
        for seed in chosen.seeds
        for labelled, folder in folders.items()
        for network in chosen.networks
    ]
    rows: dict[str, dict[str, Any]] = {}
    if earlier := read_result(chosen.result):
        if changed := [name for name, text in earlier["configs"].items() if text != _read_config(name)]:
            sys.exit(f"{chosen.result} has rows of another left_atrium_{changed[0]}.yaml; name another --result")
        rows = {row["name"]: row for row in earlier["rows"]}

    def finish(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        _write(chosen.result, [rows[one] for one in sorted(rows)])

    waiting = {job.name: partial(_run, job, chosen) for job in jobs if job.name not in rows}
    share_gpus(waiting, chosen.gpus, finish)


def _run(job: Job, chosen: argparse.Namespace, place: int) -> dict[str, Any]:
    """Train, unless it was; predict the test cases; return the row."""
    gpu = place if chosen.gpus > 1 else None
    run, data = chosen.runs / job.name, Path(job.data)
    labels = sorted((data / "labelsTs").glob("*.nii.gz"))
    clock = run / "clock.json"
    if not all((run / "test" / label.name).exists() for label in labels):
        settings = [
            f"output={run}",
            f"data.root={data}",
            f"seed={job.seed}",
            "split.validation=none",
            f"training.iterations={PER_EPOCH}",
            f"training.epochs={ITERATIONS[job.labelled] // PER_EPOCH}",
            *chosen.overrides,
        ]
        shared = ["--gpus", str(chosen.each)] if chosen.each > 1 else []
        config = CONFIGS / f"left_atrium_{job.network}.yaml"
        started = time.perf_counter()
        _call(gpu, "train", str(config), *shared, *(part for setting in settings for part in ("--set", setting)))
        trained = time.perf_counter()
        _call(gpu, "predict", str(run), str(data / "imagesTs"), "--output", str(run / "test"))
        seconds = {"training": trained - started, "prediction": time.perf_counter() - trained}
        clock.write_text(json.dumps(seconds), encoding="utf-8")
    cases = {
        label.name.removesuffix(".nii.gz"): score(_read(run / "test" / label.name), _read(label)) for label in labels
    }
    means = {metric: float(np.mean([case[metric] for case in cases.values()])) for metric in METRICS}
    row = {
        "name": job.name,
        **asdict(job),
        "gpu": _name_gpu(),
        "seconds": json.loads(clock.read_text(encoding="utf-8")),
        **means,
        "cases": cases,
    }
    print(f"{job.name:<14}" + "  ".join(f"{metric} {value:.4f}" for metric, value in means.items()), flush=True)
    return row


def _call(gpu: int | None, *arguments: str) -> None:
    """Run a command of volseg on a GPU."""
    own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    subprocess.run(run_module("volseg", *arguments), env={**os.environ, **own}, check=True)


def _name_gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _read(path: Path) -> Mask:
    """Return where a label map holds the atrium."""
    return np.asarray(read_label(path)[0]) > 0


def _read_config(network: str) -> str:
    return (CONFIGS / f"left_atrium_{network}.yaml").read_text(encoding="utf-8")


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    networks = dict.fromkeys(row["network"] for row in rows)
    configs = {network: _read_config(network) for network in networks}
    write_result(path, configs=configs, summary=summarise(rows), rows=rows)


if __name__ == "__main__":
    main()
