"""Dice, Jaccard, HD95 and ASD on the left atrium benchmark: networks, numbers of labelled cases, and seeds, as JSON.

    volseg train configs/left_atrium_vnet.yaml -o RUNS/vnet_16_0 --set data.root=DIR/LeftAtrium16 --set seed=0
        --set split.validation=none --set training.iterations=250 --set training.epochs=20
    volseg predict RUNS/vnet_16_0 DIR/LeftAtrium16/imagesTs -o RUNS/vnet_16_0/test
    python workflows/benchmarks/left_atrium_scores.py DIR/LeftAtrium16/labelsTs RUNS/*
        --result workflows/benchmarks/results/networks_h200_left_atrium.json

``datasets/left_atrium.py`` makes the data sets of 80 and of 16 labelled cases, which 40 and 20 epochs are for. A run's
folder is called by its network, number of labelled cases and seed, and holds its prediction of the 20 test cases. Rows
of ``--result`` stay.

The scores follow ``code/test_util.py`` of the repository ``yulequan/UA-MT``, which calls medpy: surfaces are voxels
that an erosion by six neighbours removes, distances are in voxels, HD95 is the 95th percentile over both directions
together, ASD the mean over the predicted surface. ASSD (mm) of ``volseg evaluate`` averages both directions.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.metrics.utils import get_mask_edges, get_surface_distance
from numpy.typing import NDArray
from results import write_result
from scipy.stats import t

from volseg.data.readers import read_label

METRICS = ("dice", "jaccard", "hd95", "asd")

Mask = NDArray[np.bool_]


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


def score_run(run: Path, labels: Sequence[Path]) -> dict[str, Any]:
    """Return the row of a run: its scores of each test case, and their means."""
    network, labelled, seed = run.name.rsplit("_", 2)
    cases = {
        label.name.removesuffix(".nii.gz"): score(_read(run / "test" / label.name), _read(label)) for label in labels
    }
    means = {metric: float(np.mean([case[metric] for case in cases.values()])) for metric in METRICS}
    print(f"{run.name:<14}" + "  ".join(f"{metric} {value:.4f}" for metric, value in means.items()), flush=True)
    return {"network": network, "labelled": int(labelled), "seed": int(seed), **means, "cases": cases}


def _read(path: Path) -> Mask:
    """Return where a label map holds the atrium."""
    return np.asarray(read_label(path)[0]) > 0


def main() -> None:
    """Score the runs, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="folder of the test cases' labels")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders NETWORK_LABELLED_SEED")
    parser.add_argument("--result", type=Path, required=True, help="JSON file")
    chosen = parser.parse_args()
    earlier = json.loads(chosen.result.read_text(encoding="utf-8"))["rows"] if chosen.result.exists() else []
    rows = {tuple(row[key] for key in ("network", "labelled", "seed")): row for row in earlier}
    for run in chosen.runs:
        row = score_run(run, sorted(chosen.labels.glob("*.nii.gz")))
        rows[row["network"], row["labelled"], row["seed"]] = row
    kept = [rows[key] for key in sorted(rows)]
    write_result(chosen.result, summary=summarise(kept), rows=kept)


if __name__ == "__main__":
    main()
