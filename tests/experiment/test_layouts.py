"""A training works with every layout, draws cases by weight, and predicts the layout's images."""

import csv
import json
import shutil
from collections import Counter

import nibabel
import numpy as np
import pytest
import torch
from training_hooks import At, press_ctrl_c
from typer.testing import CliRunner

from volseg.checkpointing.folder import RunFolder
from volseg.cli import app
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import train
from volseg.experiment.building import preprocessing_of
from volseg.experiment.cases import choose_cases, prepare_chosen
from volseg.experiment.prediction.predicting import resolve_images
from volseg.experiment.several_runs import plan_folds
from volseg.workflow import Hook

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


def test_a_table_says_how_its_cases_are_split_and_which_are_predicted(configured, task, tmp_path):
    image = next((task / "imagesTs").iterdir())
    (tmp_path / "new.csv").write_text(f"case,image\nmine,{image}\n", encoding="utf-8")
    assert resolve_images([image, tmp_path / "new.csv"])[0] == {"case": "mine", "image": image}
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
    with pytest.raises(ConfigError, match=r"split\.fold is 8, but the table of cases has folds 0 to 5"):
        choose_cases(configured(f"data.root={path}", "split.num_folds=9", "split.fold=8"))


def test_channels_in_separate_files_train_and_predict(config_file, task, tmp_path):
    """On the command line, from nnU-Net's raw layout; predictions are named after cases."""
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
    assert "new has 1 file(s): new_0000.nii.gz; needed: one for each of the 2 channels" in str(fault)


GROWTH = ("patch.growth=[{until: 0.5, size: [8, 8, 8]}]", "training.iterations=20", "training.validate_every=null")


class Seen(Hook):
    """Note the cases of each batch."""

    def __init__(self):
        self.cases = []

    def on_batch_end(self, training, fields):
        self.cases.append((training.epoch, tuple(fields["image"].shape[2:]), tuple(fields["case"])))


@pytest.fixture
def tabled(task, tmp_path, configured):
    """Return a function from the column ``weight`` to a config with a table as data set."""

    def write(*weights, settings=(), name="weight"):
        known = load_task(task)
        rows = [
            f"{case['case']},{case['image']},{case['label']},{weight}"
            for case, weight in zip(known.training, weights, strict=True)
        ]
        labels = {"labels": {str(value): name for value, name in known.labels.items()}}
        (tmp_path / "dataset.json").write_text(json.dumps(labels), encoding="utf-8")
        (tmp_path / "cases.csv").write_text("\n".join([f"case,image,label,{name}", *rows]), encoding="utf-8")
        return configured(f"data.root={tmp_path / 'cases.csv'}", *settings)

    return write


def weights_of(config):
    return [case.get("weight") for case in choose_cases(config).training]


def test_a_table_and_a_config_give_weights(configured, tabled):
    names = [case["case"] for case in choose_cases(configured("split.validation=none")).training]
    everything = ("split.validation=none",)
    assert weights_of(tabled(2, "", "0.5", 1, "1e-3", 3, settings=everything)) == [2, None, 0.5, 1, 0.001, 3]
    assert weights_of(tabled(*"123456", name="height", settings=everything)) == [None] * 6
    later = f"data.weights={{'*': 2, {names[1]}: 0, {names[2]}: 0.25}}"
    assert weights_of(configured(*everything, later)) == [2, 0.25, 2, 2, 2]  # one of weight 0 is not prepared
    assert weights_of(tabled(*"234567", settings=(*everything, f"data.weights.{names[0]}=9"))) == [9, 3, 4, 5, 6, 7]


def test_weights_that_cannot_be_are_refused_with_their_names(configured, tabled):
    with pytest.raises(ConfigError, match=r"weights: no case matches 'synthetic_01', 'x\*'; did you"):
        choose_cases(configured("data.weights={synthetic_01: 1, 'x*': 2}"))
    for wrong in ("-1", ".nan", ".inf", "much"):
        with pytest.raises(ConfigError, match=r"data\.weights\.case_7"):
            configured(f"data.weights={{case_7: {wrong}}}")
    for wrong in ("-1", "nan", "inf", "70kg"):
        with pytest.raises(DataError, match=rf"the weight of case \w+ is '{wrong}', but must be a finite number of"):
            choose_cases(tabled(1, 1, wrong, 1, 1, 1))
    with pytest.raises(DataError, match="all 4 training cases have weight 0: "):
        choose_cases(configured("data.weights={'*': 0}"))
    misspelt = tabled(*"111111", name="weights")
    with pytest.raises(DataError, match="column 'weights'; rename it to 'weight'"):
        choose_cases(misspelt)


def test_a_training_draws_by_weight_and_goes_on_with_the_same_batches(configured, caplog):
    """Interrupted in the epoch after its patches grew, from cases of a cache that the first training filled."""
    names = [case["case"] for case in choose_cases(configured()).training]
    weights = f"data.weights={{{names[0]}: 4, {names[1]}: 0}}"
    whole, half = Seen(), Seen()
    with caplog.at_level("INFO"):
        train(configured(*GROWTH, weights, "training.epochs=2"), hooks=[whole])
    assert "patches are drawn by the weights of cases: 1 of weight 0, 2 of weight 1, 1 of weight 4" in caplog.text
    assert [entry[:2] for entry in whole.cases] == [(0, (8, 8, 8))] * 20 + [(1, (16, 16, 16))] * 20
    counts = Counter(case for *_, cases in whole.cases for case in cases)
    assert counts.keys() == {names[0], names[2], names[3]}
    assert counts[names[0]] > counts[names[2]] + counts[names[3]]

    again = configured(*GROWTH, weights, "training.epochs=2", f"output={configured().folder.parent / 'again'}")
    with pytest.raises(KeyboardInterrupt):
        train(again, hooks=[half, At(1, 7, press_ctrl_c)])
    rest = Seen()
    train(again, resume=True, hooks=[rest])
    assert [*half.cases, *rest.cases] == whole.cases


def test_other_weights_do_not_prepare_cases_again_and_do_not_go_on(tabled, caplog):
    config = tabled(1, 2, 1, 1, 1, 1, settings=("training.epochs=1",))
    train(config)
    with pytest.raises(DataError, match=r"weights of cases .*task\.json: \w+ 2 -> 1, \w+ 1 -> 0\.5\. Restore"):
        train(tabled(1, 1, 0.5, 1, 1, 1, settings=("training.epochs=2",)), resume=True)
    caplog.clear()
    with caplog.at_level("INFO"):
        train(tabled(1, 1, 0.5, 1, 1, 1, settings=(f"output={config.folder.parent / 'other'}",)))
    assert "6 prepared case(s) found" in caplog.text
