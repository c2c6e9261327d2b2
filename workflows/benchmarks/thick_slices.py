"""Planned networks on Task04, with slices of 1 mm and of 5 mm, and with and without the background in the loss.

python workflows/benchmarks/thick_slices.py DIR/Task04_Hippocampus --seeds 1 2 3 --together 8 --limit 500 \
        --result workflows/benchmarks/results/dynunet_vnet_h100_thick_slices.json

Slices of 5 mm are the means of five of 1 mm; of their labels the most frequent one counts, the smallest of several.
Each training is what ``volseg configure`` plans, with ``--epochs`` epochs and one validation, in a process of its own.
Those that run together share a GPU: their Dice is what it would be alone, their seconds are not. What is not reached in
``--limit`` seconds is left out, and said. A later call with the same ``--work`` and ``--result`` goes on.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from volseg.commands import run_module

QUICK = ["training.validate_every=null", "evaluation.distances=false", "logging.loggers=[]"]

FOREGROUND = "losses=[{name: DiceCELoss, include_background: false}]"
EVERYTHING = "losses=[{name: DiceCELoss}]"


def main() -> None:
    """Make the data, plan, train side by side, and write what each training came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the task's folder")
    parser.add_argument(
        "--axes", nargs="+", default=["none", "2"], choices=["none", "0", "1", "2"], help="of the thick slices"
    )
    parser.add_argument("--factor", type=int, default=5, help="slices of 1 mm in a thick one")
    parser.add_argument("--networks", nargs="+", default=["unet", "vnet", "vnet_monai"])
    parser.add_argument(
        "--losses", nargs="+", default=["foreground", "everything"], choices=["foreground", "everything"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=12, help="of 250 batches")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of all")
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which no training begins")
    parser.add_argument("--work", type=Path, default=Path("runs/thick_slices"))
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.limit
    result = read_result(chosen.result)
    plans = dict(make_plans(chosen, result))
    wanted = [
        (axis, network, loss, seed)
        for seed in chosen.seeds
        for axis in chosen.axes
        for network in chosen.networks
        for loss in chosen.losses
        if (axis, network) in plans
    ]

    def train(job: tuple[str, str, str, int]) -> None:
        name = "_".join(map(str, job))
        if time.monotonic() < end and name not in result["rows"]:
            config, overrides = plans[job[:2]]
            loss = FOREGROUND if job[2] == "foreground" else EVERYTHING
            own = [*overrides, loss, f"seed={job[3]}", f"training.epochs={chosen.epochs}"]
            result["rows"][name] = run(config, [*QUICK, *own, *chosen.overrides], chosen.work / name)
            print(f"{name:32} {json.dumps(result['rows'][name])}", flush=True)
            write_result(chosen.result, result)

    with ThreadPoolExecutor(chosen.together) as lanes:
        list(lanes.map(train, wanted))
    left = [job for job in wanted if "_".join(map(str, job)) not in result["rows"]]
    print(f"not reached: {left or 'none'}")


def read_result(path: Path) -> dict[str, Any]:
    """Return what an earlier call wrote, or the beginning of a result."""
    from volseg.monitoring.environment import environment

    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    command = shlex.join(["python", *sys.argv])
    return {"command": command, "environment": environment(), "plans": {}, "rows": {}}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write all rows that there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_plans(
    chosen: argparse.Namespace, result: dict[str, Any]
) -> Iterator[tuple[tuple[str, str], tuple[Path, Sequence[str]]]]:
    """Yield the config and the overrides of each data set and network."""
    from volseg import experiment
    from volseg.planning import write_config

    for axis in chosen.axes:
        root = chosen.root
        if axis != "none":
            root = chosen.work / f"Task04_axis{axis}"
            if not root.exists():
                make_thick(chosen.root, root, int(axis), chosen.factor)
        planned = {preset: experiment.configure(root, preset=preset) for preset in ("unet", "vnet")}
        for network in chosen.networks:
            preset, _, variant = network.partition("_")
            plan = planned[preset]
            path = chosen.work / f"{axis}_{preset}.yaml"
            write_config(plan, path, overwrite=True)
            overrides = VARIANTS[variant](plan) if variant else []
            if overrides is not None:
                result["plans"][f"{axis}_{network}"] = {
                    "patch": plan.geometry.patch, "batch": plan.geometry.batch,
                    "strides": plan.geometry.topology.strides, "kernels": plan.geometry.topology.kernels,
                    "overrides": overrides,
                }  # fmt: skip
                yield (axis, network), (path, overrides)


def plan_as_monai(plan: Any) -> list[str] | None:
    """Return the overrides of a plan for MONAI's V-Net, as plans were before; None where it is one."""
    from volseg.models.topology import VNET_MONAI
    from volseg.planning.patch import count_vnet_features, plan_batch, plan_patch
    from volseg.planning.settings import PEAK_RATES

    geometry, outputs = plan.geometry, len(plan.fingerprint.labels)
    if geometry.topology == VNET_MONAI:
        return None
    found = plan_patch(
        geometry.spacing,
        geometry.median_shape,
        lambda patch, topology: count_vnet_features(patch, topology, outputs),
        geometry.reference,
        shape=lambda *_: VNET_MONAI,
    )
    batch = plan_batch(found.features, geometry.reference, int(np.prod(found.size)), geometry.voxels, share=0.05)
    peak, usual = PEAK_RATES["vnet"]
    size = json.dumps(found.size)
    return [
        f"patch.size={size}", f"inference.window={size}", f"patch.batch={batch}",
        f"optimizer.lr={min(peak, peak * (batch / usual) ** 0.5):.2g}",
        f"network.strides={json.dumps(VNET_MONAI.strides)}", f"network.kernel_size={json.dumps(VNET_MONAI.kernels)}",
    ]  # fmt: skip


def with_kernel(side: int) -> Any:
    """Return a function to the overrides of shorter kernels along thick slices."""

    def change(plan: Any) -> list[str] | None:
        topology, coarse = plan.geometry.topology, plan.geometry.coarse
        if max(plan.geometry.spacing) / min(plan.geometry.spacing) < 2:
            return None
        kernels = [
            [min(length, side) if axis == coarse else length for axis, length in enumerate(kernel)]
            for kernel in topology.kernels
        ]
        return [f"network.kernel_size={json.dumps(kernels)}"]

    return change


VARIANTS = {"monai": plan_as_monai, "three": with_kernel(3)}


def make_thick(root: Path, output: Path, axis: int, factor: int) -> None:
    """Write a data set whose slices along an axis are ``factor`` times as thick; what is left over is cut off."""
    for kind in ("imagesTr", "labelsTr"):
        (output / kind).mkdir(parents=True)
        for path in sorted((root / kind).glob("[!.]*.nii.gz")):
            image = nibabel.load(path)
            voxels = np.moveaxis(np.asanyarray(image.dataobj), axis, 0)
            whole = voxels[: len(voxels) // factor * factor]
            slices = whole.reshape(-1, factor, *whole.shape[1:])
            if kind == "imagesTr":
                thick = slices.mean(1, dtype=np.float32)
            else:
                counts = np.stack([(slices == label).sum(1) for label in range(int(voxels.max()) + 1)])
                thick = counts.argmax(0).astype(np.uint8)
            scale, shift = np.ones(4), np.zeros(3)
            scale[axis], shift[axis] = factor, (factor - 1) / 2
            affine = image.affine @ np.diag(scale)
            affine[:3, 3] = image.affine[:3, :3] @ shift + image.affine[:3, 3]
            nibabel.save(nibabel.Nifti1Image(np.moveaxis(thick, 0, axis), affine), output / kind / path.name)
    (output / "dataset.json").write_text((root / "dataset.json").read_text(encoding="utf-8"), encoding="utf-8")


def run(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train as a user would; return what the run folder says."""
    settings = [word for override in [*overrides, f"output={folder}"] for word in ("--set", override)]
    command = run_module("volseg", "train", str(config), *settings, "--quiet")
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - begun, 1)}
    if done.returncode:
        return {**found, "failed": done.stderr.strip().splitlines()[-3:]}
    from volseg.experiment import RunFolder

    run_folder = RunFolder(folder)
    summary = json.loads((run_folder.validation / "summary.json").read_text(encoding="utf-8"))
    last = list(run_folder.history())[-1]
    told = {name: last.scalars.get(f"train/{name}") for name in ("loss", "soft_dice")}
    return {**found, "dice": summary["foreground_mean"]["Dice"], **told}


if __name__ == "__main__":
    main()
