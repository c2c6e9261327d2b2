"""Train two networks on labelled cases, label other images with them, and train on both sets with weights.

python workflows/unlabelled.py DIR/unlabelled my_vnet.yaml my_unet.yaml --output runs/unlabelled

The first config names the labelled cases. One config is trained with two seeds. OUTPUT/data/cases.csv lists all cases.
"""

import argparse
import csv
import json
from pathlib import Path

import nibabel
import numpy as np

from volseg.data.readers import list_files
from volseg.experiment import format_outcome, load_config, predict, train
from volseg.experiment.cases import choose_cases
from volseg.experiment.prediction.predicting import resolve_images


def main() -> None:
    """Label images with two networks, keep the certain voxels and cases, and train on them too."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("images", type=Path, help="unlabelled images")
    arguments.add_argument("configs", nargs="+", help="configs of the two networks; the first is trained again")
    arguments.add_argument("--output", type=Path, default=Path("runs/unlabelled"))
    arguments.add_argument("--entropy", type=float, default=0.8, help="largest entropy of a voxel that is kept, 0 to 1")
    arguments.add_argument("--keep", type=float, default=0.8, help="share of cases to keep, the most certain first")
    arguments.add_argument("--share", type=float, default=0.5, help="share of patches from cases without labels")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value")
    given = arguments.parse_args()
    if not (0 < given.share < 1 and 0 < given.keep <= 1 and 0 <= given.entropy <= 1):
        arguments.error("--share is between 0 and 1, --keep above 0 and at most 1, --entropy from 0 to 1")
    configs = given.configs * (2 if len(given.configs) == 1 else 1)
    folders = [given.output / f"teacher_{seed}" for seed in range(len(configs))]
    first = load_config(configs[0], given.set)
    window = f"inference={first.inference.model_dump_json()}"  # an ensemble predicts with one window
    for seed, folder in enumerate(folders):
        train(load_config(configs[seed], [*given.set, window, f"output={folder}", f"seed={seed}"]))
    predicted = predict(folders, given.images, given.output / "predicted", uncertainty=True, strict=True)
    chosen = choose_cases(first)
    labels, names = chosen.task.labels, chosen.task.modalities
    data = given.output / "data"
    doubts = {}
    ignore = max(labels) + 1 if chosen.task.ignore is None else chosen.task.ignore
    data.mkdir()
    for case, path in predicted.label_maps.items():
        label_map = nibabel.load(path)
        values = np.asanyarray(label_map.dataobj)
        doubtful = nibabel.load(path.parent / "uncertainty" / path.name).get_fdata() > given.entropy
        doubts[case] = doubtful.sum() / max(1, (values > 0).sum())  # relative to what was found
        certain = np.where(doubtful, ignore, values).astype(np.min_scalar_type(ignore))
        nibabel.save(nibabel.Nifti1Image(certain, label_map.affine), data / path.name)
    surest = sorted(doubts, key=doubts.get)[: max(1, round(given.keep * len(doubts)))]
    weight = given.share / (1 - given.share) * len(chosen.training) / len(surest)
    new = [{**case, "label": data / f"{case['case']}.nii.gz"} for case in resolve_images(given.images, names)]
    rows = [(case, "train", case.get("weight", 1)) for case in chosen.training]
    rows += [(case, "validation", 1) for case in chosen.validation]
    rows += [(case, "train", weight) for case in new if case["case"] in surest]
    columns = ["image"] if len(list_files(new[0]["image"])) == 1 else [f"image_{name}" for name in names]
    with (data / "cases.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerow(["case", *columns, "label", "split", "weight"])
        for case, *rest in rows:
            paths = [path.resolve() for path in (*list_files(case["image"]), case["label"])]
            csv.writer(file).writerow([case["case"], *paths, *rest])
    declared = {"labels": labels, "modality": [*names], "ignore": ignore, "regions": dict(chosen.task.regions)}
    (data / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    settings = [f"data.root={data}/cases.csv", "split.file=null", "split.fold=0", f"output={given.output}/student"]
    print(format_outcome(train(load_config(given.configs[0], [*given.set, *settings]))))


if __name__ == "__main__":
    main()
