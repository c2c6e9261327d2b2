"""A training begins alike from every layout, and predicts what lies in it."""

import csv
import json
import shutil

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from volseg.checkpointing.folder import RunFolder
from volseg.cli import app
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.experiment.building import preprocessing_of
from volseg.experiment.cases import choose_cases, prepare_chosen
from volseg.experiment.prediction.predicting import resolve_images
from volseg.experiment.several_runs import plan_folds

LABELS = ["background", "Anterior", "Posterior"]


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def lay_out_nnunet(cases, folder):
    for case in cases:
        copy(case["image"], folder / f"imagesTr/{case['case']}_0000.nii.gz")
        copy(case["label"], folder / f"labelsTr/{case['case']}.nii.gz")
    declared = {"channel_names": {"0": "MRI"}, "numTraining": len(cases), "file_ending": ".nii.gz"}
    declared["labels"] = {name: value for value, name in enumerate(LABELS)}
    (folder / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    return folder


def lay_out_pairs(cases, folder):
    for case in cases:
        copy(case["image"], folder / f"images/{case['case']}.nii.gz")
        copy(case["label"], folder / f"labels/{case['case']}.nii.gz")
    return folder


def lay_out_folders(cases, folder):
    for case in cases:
        copy(case["image"], folder / case["case"] / "t1.nii.gz")
        copy(case["label"], folder / case["case"] / "seg.nii.gz")
    return folder


def lay_out_table(cases, folder):
    folder.mkdir()
    with (folder / "cases.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("case", "image", "label"), *(tuple(map(str, case.values())) for case in cases)])
    return folder / "cases.csv"


@pytest.mark.parametrize("lay_out", [lay_out_nnunet, lay_out_pairs, lay_out_folders, lay_out_table])
def test_every_layout_prepares_the_same_cases(configured, task, tmp_path, lay_out):
    def prepare(root):
        config = configured(f"data.root={root}")
        chosen = choose_cases(config)
        return chosen, prepare_chosen(chosen, preprocessing_of(config), skip_bad=False)

    expected, by_msd = prepare(task)
    chosen, prepared = prepare(lay_out(load_task(task).training, tmp_path / "laid_out"))
    assert chosen.split == expected.split
    assert list(chosen.task.labels) == list(expected.task.labels)
    assert prepared.fingerprints == by_msd.fingerprints
    for ours, theirs in zip(prepared.training, by_msd.training, strict=True):
        torch.testing.assert_close(ours["image"].as_tensor(), theirs["image"].as_tensor(), rtol=0, atol=0)


def test_a_table_says_how_its_cases_are_split(configured, task, tmp_path):
    cases = load_task(task).training
    path = lay_out_table(cases, tmp_path / "laid_out")
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([f"{lines[0]},fold", *(f"{line},{n % 6}" for n, line in enumerate(lines[1:]))]), "utf-8")
    ids = [case["case"] for case in cases]
    config = configured(f"data.root={path}", "split.fold=2")
    assert choose_cases(config).split.validation == (ids[2],)
    plan = plan_folds(config, load_task(path))
    assert [fold.split.validation for fold in plan] == [(name,) for name in ids]
    assert all(fold.config.split.num_folds == 6 for fold in plan)  # written to a run's folder, it is read again
    own = tmp_path / "splits_final.json"
    own.write_text(json.dumps([{"train": ids[1:], "val": ids[:1]}]), encoding="utf-8")
    assert choose_cases(configured(f"data.root={path}", f"split.file={own}")).split.validation == (ids[0],)
    with pytest.raises(ConfigError, match=r"split\.fold is 8, but the table of cases holds folds 0 to 5"):
        choose_cases(configured(f"data.root={path}", "split.num_folds=9", "split.fold=8"))


def test_channels_in_separate_files_train_and_predict(config_file, task, tmp_path):
    """By the command line, from nnU-Net's raw layout; what is predicted is named after the case, not the channel."""
    root = lay_out_nnunet(load_task(task).training, tmp_path / "Dataset001_Two")
    for first in (root / "imagesTr").glob("*_0000.nii.gz"):
        image = nibabel.load(first)
        second = nibabel.Nifti1Image(np.square(image.get_fdata(dtype=np.float32)), image.affine)
        nibabel.save(second, first.with_name(first.name.replace("_0000", "_0001")))
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    declared["channel_names"] = {"0": "T1", "1": "T2"}
    (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    overrides = [f"--set=data.root={root}", "--set=training.epochs=1"]
    CliRunner().invoke(app, ["train", str(config_file), *overrides], catch_exceptions=False)
    run = RunFolder(tmp_path / "run")
    assert run.task().modalities == ("T1", "T2")
    (root / "imagesTs").mkdir()
    for channel in ("0000", "0001"):
        copy(root / f"imagesTr/synthetic_001_{channel}.nii.gz", root / f"imagesTs/new_{channel}.nii.gz")
    output = tmp_path / "out"
    command = ["predict", str(run.path), str(root / "imagesTs"), "-o", str(output)]
    CliRunner().invoke(app, command, catch_exceptions=False)
    predicted = nibabel.load(output / "new.nii.gz")
    original = nibabel.load(root / "imagesTs/new_0000.nii.gz")
    assert predicted.shape == original.shape
    np.testing.assert_allclose(predicted.affine, original.affine, atol=1e-5)
    written = (output / "new.nii.gz").stat().st_mtime_ns
    CliRunner().invoke(app, [*command, "--resume"], catch_exceptions=False)
    assert (output / "new.nii.gz").stat().st_mtime_ns == written
    (root / "imagesTs/new_0001.nii.gz").unlink()
    fault = CliRunner().invoke(app, command).exception
    assert isinstance(fault, DataError)
    assert "new has 1 file(s), new_0000.nii.gz; needed: one for each of the 2 channels" in str(fault)


def test_a_table_names_what_is_predicted(task, tmp_path):
    image = next((task / "imagesTs").iterdir())
    (tmp_path / "new.csv").write_text(f"case,image\nmine,{image}\n", encoding="utf-8")
    assert resolve_images([tmp_path / "new.csv"]) == [{"case": "mine", "image": image}]
    assert resolve_images([image, tmp_path / "new.csv"])[0] == {"case": "mine", "image": image}


def test_a_run_remembers_regions_and_what_is_ignored(configured, tmp_path):
    """Where the run is predicted with, the data may be gone."""
    for name in ("images/a.nii", "labels/a.nii", "images/b.nii", "labels/b.nii", "images/c.nii", "labels/c.nii"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    text = "labels: {background: 0, organ: [4, 1], lesion: [4], ignore: 7}\nregions_class_order: [1, 4]\n"
    (tmp_path / "data/task.yaml").write_text(text, encoding="utf-8")
    config = configured(f"data.root={tmp_path / 'data'}")
    chosen = choose_cases(config)
    run = RunFolder(tmp_path / "run")
    run.begin(config, chosen.task, chosen.split, {"environment.json": {}})
    kept = run.task()
    assert (kept.labels, kept.regions, kept.ignore) == (chosen.task.labels, chosen.task.regions, 7)
    assert kept.regions == {"organ": (1, 4), "lesion": (4,)}
