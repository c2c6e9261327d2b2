"""Run folders as trainings write them, with awkward names."""

import json
import math
import random

import numpy as np
import yaml
from PIL import Image

from volseg.monitoring.run_files import EpochLine, RunPart, RunStatus, append_history, write_status, write_times

SCRIPT = "<script>alert(1)</script>"
LABELS = {"1": "Anterior", "2": '"><img src=http://example.org/x.png>'}
BEGUN = 1_760_000_000.0


def make_run(folder, *, cases=12, epochs=20, seed=0, names=(SCRIPT,), overlays=True):
    """Write everything that a finished training leaves for its report."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    config = {
        "name": "<b>bold</b> & co",
        "data": {"root": "/data/<Task>"},
        "split": {"fold": seed, "num_folds": 2},
        "network": {"name": "DynUNet", "filters": [8, 16]},
        "patch": {"size": [40, 56, 40], "batch": 2},
        "training": {"epochs": epochs, "iterations": 12, "precision": "auto"},
        "optimizer": {"name": "AdamW", "lr": 3e-3},
        "losses": [{"name": "DiceCELoss"}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    put(folder / "environment.json", {"volseg": "0.1", "python": "3.13", "libraries": {"torch": "2.13"}, "gpus": []})
    put(folder / "task.json", {"name": "Task00_<i>", "modalities": ["MRI"], "labels": {"0": "background", **LABELS}})
    ids = [*names, *(f"case_{seed}_{number:03}" for number in range(cases - len(names)))]
    put(folder / "split.json", [{"train": [f"train_{number}" for number in range(30)], "val": ids}])
    judged = {case: {key: draw.uniform(0.6, 0.95) for key in LABELS} for case in ids}
    summary = make_summary(judged)
    put(folder / "validation" / "summary.json", summary)
    write_history(folder, epochs, draw)
    parts = ({"reading": 60.0, "training": 3000.0}, {"training": 500.0, "validation": 90.0})
    write_times(
        folder / "times.json",
        [
            RunPart(begun=BEGUN + 9000 * number, seconds=sum(spans.values()) + 10, spans=spans)
            for number, spans in enumerate(parts)
        ],
    )
    write_status(
        folder / "status.json",
        RunStatus(
            state="finished", time=BEGUN + 9600, started=BEGUN + 9000, host="here", pid=1, epoch=epochs, epochs=epochs
        ),
    )
    device = {"device": "cuda:0", "used": 2**30, "reserved": 2**31, "process": 0}
    forecast = {"used": 2**30, "reserved": 2**31 + 2**29}
    put(folder / "memory.json", {"measured": [{"steps": 8, "devices": [device]}], "forecast": forecast})
    published = [
        {
            "method": "nnU-Net <3d>",
            "evaluation": "5-fold cross-validation",
            "num_cases": 260,
            "dice": {"1": 0.8975, "2": 0.8807},
            "source": "a paper",
        }
    ]
    put(
        folder / "told.json",
        {"problems": [f"{SCRIPT}: voxels are NaN"], "remarks": ["1 case(s): odd"], "published": published},
    )
    if overlays:
        worst_and_best = sorted(ids, key=lambda case: sum(judged[case].values()))
        for case in (*worst_and_best[:5], *worst_and_best[-5:]):
            file = folder / "validation" / "overlays" / f"{case.replace('/', '_')}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(np.zeros((60, 90, 3), np.uint8)).save(file)
    return folder


def make_summary(judged):
    cases = [
        {
            "prediction_file": f"/runs/validation/{case.replace('/', '_')}.nii.gz",
            "reference_file": None,
            "metrics": {
                key: {
                    "Dice": dice,
                    "HD95": None if number == 1 else 3.5 * dice,
                    "n_pred": 0 if number == 1 else 9,
                    "n_ref": 9,
                }
                for key, dice in of.items()
            },
        }
        for number, (case, of) in enumerate(judged.items())
    ]
    means = {key: sum(of[key] for of in judged.values()) / len(judged) for key in LABELS}
    return {
        "foreground_mean": {"Dice": sum(means.values()) / len(means)},
        "mean": {key: {"Dice": mean, "HD95": 3.0} for key, mean in means.items()},
        "median": {key: {"Dice": mean, "HD95": 3.0} for key, mean in means.items()},
        "undefined": {key: {"HD95": 1} for key in means},
        "intervals": {"mean": {key: {"Dice": [mean - 0.02, mean + 0.02]} for key, mean in means.items()}},
        "labels": LABELS,
        "metric_per_case": cases,
    }


def write_history(folder, epochs, draw):
    for epoch in range(epochs):
        loss = 1.5 * math.exp(-epoch / 5) - 0.4 + draw.uniform(0, 0.1)
        scalars = {
            "train/loss": loss,
            "train/gradient_norm": draw.uniform(1, 4),
            "lr": 3e-3 * (1 - epoch / epochs),
            "time/epoch_seconds": 20 + draw.random(),
            "time/data_wait_seconds": draw.random(),
            "voxels_per_second": 2e6 + 1e5 * draw.random(),
        }
        if epoch % 2:
            dice = {f"val/dice/{name}": 0.9 - math.exp(-epoch / 4) for name in LABELS.values()}
            scalars |= {"val/dice_mean": sum(dice.values()) / 2, **dice, "val/hd95/Anterior": 4 - epoch / 10}
        line = EpochLine(epoch=epoch + 1, step=12 * (epoch + 1), time=BEGUN + 60 * epoch, scalars=scalars)
        with (folder / "history.jsonl").open("a", encoding="utf-8") as history:
            append_history(history, line)


def make_crossed(folder, **settings):
    """Write a cross-validation of two folds; the settings are those of `make_run`."""
    for number in range(2):
        make_run(folder / f"fold_{number}", seed=number, names=(SCRIPT,) if number == 0 else (), **settings)
    summaries = [
        json.loads((folder / f"fold_{number}/validation/summary.json").read_text("utf-8")) for number in range(2)
    ]
    cases = [case for summary in summaries for case in summary["metric_per_case"]]
    put(folder / "summary.json", {**summaries[0], "metric_per_case": cases})
    label = {"of_folds": [0.8, 0.82], "mean_of_folds": 0.81, "mean": 0.81, "std": 0.05, "low": 0.79, "high": 0.83}
    first = json.loads((folder / "fold_0" / "told.json").read_text("utf-8"))
    results = {
        "name": "crossed",
        "task": "Task00_<i>",
        "num_folds": 2,
        "num_cases": len(cases),
        "labels": {**dict.fromkeys(LABELS.values(), label), "mean": label},
        "folds": [{"fold": 0}, {"fold": 1}],
        "failures": {},
        "published": first["published"],
        "config": yaml.safe_load((folder / "fold_0" / "config.yaml").read_text("utf-8")),
        "environment": {"python": "3.13"},
    }
    put(folder / "cross_validation.json", results)
    return folder


def put(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
