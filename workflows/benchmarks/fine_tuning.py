"""Fine-tuning against training from scratch, on the hippocampi of Task04: from both parts to one of them.

A network learns the anterior and the posterior hippocampus from half of the cases. Another task has the other half, and
asks for the posterior part alone. It is trained for a few iterations, begun with these weights and without::

    python workflows/benchmarks/fine_tuning.py ../shared/data/Task04_Hippocampus --output unet_cpu_fine_tuning.json
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np

from volseg.data import load_task
from volseg.data.cases import Case
from volseg.experiment import load_config, train
from volseg.monitoring.environment import environment

CONFIG = """
name: hippocampus
data: {root: .}
preprocessing: [{name: Orientation}, {name: ZScore}]
patch: {size: [32, 40, 32], batch: 2, foreground: 0.5}
network: {name: UNet, channels: [16, 32, 64], strides: [2, 2], num_res_units: 1, norm: INSTANCE}
optimizer: {name: AdamW, lr: 3.0e-3}
training: {epochs: 1}
"""


def make_task(folder: Path, cases: Sequence[Case], labels: dict[int, str], values: Sequence[int]) -> Path:
    """Write a task of these cases; ``values`` are what 0, 1 and 2 become in its label maps."""
    for name in ("imagesTr", "labelsTr", "imagesTs"):
        (folder / name).mkdir(parents=True)
    for case in cases:
        (folder / "imagesTr" / f"{case['case']}.nii.gz").symlink_to(Path(case["image"]).resolve())
        label = nibabel.load(case["label"])
        voxels = np.array(values, dtype=np.uint8)[np.asanyarray(label.dataobj).astype(np.uint8)]
        nibabel.save(nibabel.Nifti1Image(voxels, label.affine), folder / "labelsTr" / f"{case['case']}.nii.gz")
    listed = [{key: f"./{key}sTr/{case['case']}.nii.gz" for key in ("image", "label")} for case in cases]
    described = {"name": folder.name, "modality": {"0": "MRI"}, "labels": labels, "training": listed, "test": []}
    (folder / "dataset.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def main() -> None:
    """Train, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=80, help="of both tasks together")
    parser.add_argument("--first", type=int, default=300, help="iterations of the training that is begun with")
    parser.add_argument(
        "--few", type=int, nargs="+", default=[10, 30, 100], help="iterations of those that are compared"
    )
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    cases = load_task(given.task).training[: given.cases]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        labels = {0: "background", 1: "Anterior", 2: "Posterior"}
        both = make_task(folder / "Task01_Both", cases[::2], labels, (0, 1, 2))
        one = make_task(folder / "Task02_One", cases[1::2], {0: "background", 1: "Tail"}, (0, 0, 1))

        def dice_of(run: str, root: Path, iterations: int, *more: str) -> float:
            values = [f"data.root={root}", f"output={folder / run}", f"training.iterations={iterations}", *more]
            outcome = train(load_config(config, values))
            assert outcome.validated is not None
            return float(outcome.validated.summary["foreground_mean"]["Dice"])

        first = dice_of("first", both, given.first)
        start = [f"training.start_from={folder / 'first'}"]
        rows = [
            {
                "iterations": few,
                "seed": seed,
                "scratch": dice_of(f"scratch_{few}_{seed}", one, few, f"seed={seed}"),
                "fine_tuned": dice_of(f"tuned_{few}_{seed}", one, few, f"seed={seed}", *start),
            }
            for few in given.few
            for seed in range(given.seeds)
        ]
    for row in rows:
        print(row)
    result = {"config": CONFIG, "cases": len(cases), "first": {"iterations": given.first, "dice": first}, "dice": rows}
    given.output.write_text(json.dumps({**result, "environment": environment()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
