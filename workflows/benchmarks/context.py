"""Patches against whole volumes on a constructed task that only a whole volume solves, as JSON.

python workflows/benchmarks/context.py --output workflows/benchmarks/results/dynunet_h200_context.json
python workflows/benchmarks/context.py --side 32 --cases 250 --batch 4 --steps 700 --filters 8 16 32 64 128 \
        --patches whole --device cpu --output FILE

Two equal balls lie at one end of W, side by side along D, and a dark cube at the other end of W, on the side of one
ball. This ball is `near`, the other one `far`; nothing else tells them apart, and between ball and cube are 0.4 of W.
The same U-Net trains on whole volumes, on halves along D and on eighths, with equal numbers of steps and of voxels in a
step. A half that holds a ball holds the place of its cube too; an eighth does not. A network that finds the balls and
guesses their names has a mean Dice of about 0.5.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from results import make_parser, write_result

from volseg.config.loading import build_config
from volseg.experiment import train

NOISE = 0.3  # standard deviation; balls are 1 above the background, the cube 1 below
PATCHES = {"whole": (1, 1, 1), "half": (2, 1, 1), "eighth": (2, 2, 2)}
"""Parts of the volume along D, H, W."""


def make_case(side: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (uint8) and its label map (uint8), both ``(D, H, W)`` with ``side`` voxels along each axis."""
    image = random.normal(0, NOISE, (side, side, side)).astype(np.float32)
    label = np.zeros(image.shape, np.uint8)
    x, y, z = np.ogrid[:side, :side, :side]
    landmark = int(random.integers(2))
    height, depth = random.uniform(0.2, 0.8), random.uniform(0.8, 0.88)
    for place in range(2):
        centre = (0.25 + 0.5 * place + random.uniform(-0.05, 0.05), height, depth)
        squares = sum((axis / side - middle) ** 2 for axis, middle in zip((x, y, z), centre, strict=True))
        ball = squares < (1 / 9) ** 2
        image[ball] += 1
        label[ball] = 1 if place == landmark else 2
    corner = [int(side * at) for at in (0.125 + 0.5 * landmark, random.uniform(0.1, 0.65), random.uniform(0, 0.06))]
    image[tuple(slice(start, start + side // 4) for start in corner)] -= 1
    return np.clip(image * 40 + 128, 0, 255).astype(np.uint8), label


def write_case(number: int, folder: Path, side: int) -> dict[str, str]:
    """Write an image and its label map, 1 mm, and return their paths."""
    paths = [f"./{kind}/{number:03d}.nii" for kind in ("imagesTr", "labelsTr")]
    for path, values in zip(paths, make_case(side, np.random.default_rng(number)), strict=True):
        nib.save(nib.Nifti1Image(values, np.eye(4)), folder / path)
    return dict(zip(("image", "label"), paths, strict=True))


def write_task(folder: Path, side: int, cases: int) -> None:
    """Write the volumes in the Decathlon's layout."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        listed = [*pool.map(partial(write_case, folder=folder, side=side), range(cases))]
    labels = {"0": "background", "1": "near", "2": "far"}
    description = {"name": "Context", "modality": {"0": "MRI"}, "labels": labels, "training": listed, "test": []}
    (folder / "dataset.json").write_text(json.dumps(description), encoding="utf-8")


def train_on(parts: tuple[int, int, int], folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train on patches of these parts of the volume, and return scores, seconds and memory."""
    size = [chosen.side // part for part in parts]
    values = {
        "name": "context",
        "output": str(chosen.runs / "x".join(map(str, size))),
        "device": chosen.device,
        "data": {"root": str(folder), "keep": "auto"},
        "preprocessing": [{"name": "ZScore"}],
        "patch": {"size": size, "batch": chosen.batch * int(np.prod(parts)), "foreground": 0.5},
        "augmentation": {
            name: {"probability": 0.0}
            for name in ("rotation", "scaling", "elastic", "mirror", "blur", "low_resolution")
        },
        "network": {"name": "DynUNet", "filters": chosen.filters, "strides": [1, *[2] * (len(chosen.filters) - 1)]},
        "losses": [{"name": "DiceCELoss", "include_background": False}],
        "optimizer": {"name": "AdamW", "lr": 0.004},
        "schedule": {"name": "cosine", "warmup": 0.05},
        "training": {"epochs": 10, "iterations": chosen.steps // 10, "validate_every": 10, "clip": 12},
        "inference": {"window": size},
    }
    outcome = train(build_config(values, [], "context"))
    assert outcome.validated is not None
    dice = outcome.validated.summary["foreground_mean"]["Dice"]
    print(f"patch {size}: Dice {dice:.3f}, {outcome.seconds:.0f} s", flush=True)
    losses = [record.losses["loss"] for record in outcome.history]
    return {"patch": size, "seconds": round(outcome.seconds, 1), "dice": dice, "losses": losses}


def main() -> None:
    """Make the task, train on each kind of patch and write the result after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1, help="volumes in a step, or their voxels in patches")
    parser.add_argument("--cases", type=int, default=125, help="a fifth of them validates")
    parser.add_argument("--filters", type=int, nargs="+", default=[8, 16, 32, 64, 128, 128, 128])
    parser.add_argument("--patches", nargs="+", default=[*PATCHES], choices=[*PATCHES])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs/context"))
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    folder = chosen.runs / f"task_{chosen.side}_{chosen.cases}"
    if not folder.exists():
        write_task(folder, chosen.side, chosen.cases)
    rows = []
    for name in chosen.patches:
        rows.append({"name": name, **train_on(PATCHES[name], folder, chosen)})
        write_result(chosen.output, rows=rows)


if __name__ == "__main__":
    main()
