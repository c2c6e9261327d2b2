"""Data sets of one's own: what was trained on or planned from in silence was not what the folder said."""

import importlib
import json
import logging
import os
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import SimpleITK
import yaml
from tiny_trainings import as_a_new_process

from tests.experiment.conftest import CONFIG
from volseg.data import load_task
from volseg.data.case_store.case_cache import CaseCache
from volseg.data.checks.repair import repair_task
from volseg.data.checks.task import check_task
from volseg.data.readers import SUFFIXES
from volseg.data.splits import read_splits
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.experiment import load_config, train
from volseg.planning import Fingerprint, plan, take_fingerprint
from volseg.planning.fingerprint import CaseSizes, keep_fingerprint, load_fingerprint
from volseg.transforms.preprocessing import build_preprocessing


@pytest.fixture
def folder(tmp_path):
    return make_task(tmp_path / "Task00_Synthetic", num_cases=4, num_test=0)


def config_of(root, output, *more):
    config = {**CONFIG, "data": {"root": str(root)}, "split": {"num_folds": 2}, "augmentation": {"enabled": False}}
    config["training"] = {"epochs": 1, "iterations": 1}
    file = output.parent / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return load_config(file, [f"output={output}", *more])


def write_table(folder, cases, order=1):
    """Write a table of cases, in their order or backwards, every second one in the second fold."""
    rows = [f"{case['case']},{case['image']},{case['label']},{place % 2}\n" for place, case in enumerate(cases)]
    (folder / "cases.csv").write_text("case,image,label,fold\n" + "".join(rows[::order]), encoding="utf-8")
    return folder / "cases.csv"


def declare(folder, **more):
    file = folder / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | more), encoding="utf-8")


def test_a_table_with_folds_trains_with_a_cache(folder, tmp_path):
    """Every training from a table with a column ``fold`` or ``split`` ended by "a prepared case cannot be stored by
    Split": the folds, from which no voxel follows, were part of a stored case's name."""
    cases = load_task(folder).training
    for name, order in (("first", 1), ("other folds", -1)):
        table = write_table(tmp_path, cases, order)
        train(config_of(table, tmp_path / name, f"data.cache={tmp_path / 'cache'}"))
    assert len(list((tmp_path / "cache" / "cases").iterdir())) == len(cases)


def test_regions_in_another_order_get_new_heads(folder, tmp_path):
    """Regions are outputs in their order, and mappings are equal whatever theirs is: a fine-tuning for (back, front)
    kept the head for front as back's."""
    declare(folder, regions={"front": [1], "back": [2]})
    train(config_of(folder, tmp_path / "first"))
    declare(folder, regions={"back": [2], "front": [1]})
    train(config_of(folder, tmp_path / "second", f"training.start_from={tmp_path / 'first'}"))
    assert json.loads((tmp_path / "second" / "start.json").read_text(encoding="utf-8"))["new"]


@pytest.mark.parametrize(
    ("regions", "remedy"),
    [
        ({"core": [2], "whole": [1, 2]}, "'whole', the last of these, is painted over them with 1"),
        ({"one": [1, 3], "other": [2, 3]}, "or add one of 3 alone"),
    ],
)
def test_regions_that_would_be_painted_over_are_refused(folder, regions, remedy):
    """A core that is declared before the whole was trained, painted over in every prediction, and scored 0."""
    named = {"0": "background", "1": "a", "2": "b", "3": "c"}
    declare(folder, labels=named, regions=regions)
    with pytest.raises(DataError, match=remedy):
        load_task(folder)
    whole = {"whole": [1, 2, 3], "core": [2, 3], "middle": [3]}
    declare(folder, labels=named, regions=whole)
    assert load_task(folder).output_values == (1, 2, 3)


def test_a_checkpoint_of_a_run_says_what_its_labels_and_channels_are(folder, tmp_path, caplog):
    """Named by its file and not by its folder, a run's labels were not asked for: with the same number of them its
    heads were kept for whatever they are called now, and its validation cases were not looked at."""
    train(config_of(folder, tmp_path / "first"))
    declare(folder, labels={"0": "background", "1": "Posterior", "2": "Anterior"}, modality={"0": "T2"})
    start = f"training.start_from={tmp_path / 'first' / 'checkpoints' / 'latest.pt'}"
    with caplog.at_level(logging.WARNING):
        train(config_of(folder, tmp_path / "second", start, "split.fold=1"))
    assert json.loads((tmp_path / "second" / "start.json").read_text(encoding="utf-8"))["new"]
    assert "2 of this run's 2 validation cases" in caplog.text
    assert "trained on the channels MRI, in this order, and this run has T2" in caplog.text


def write(path, voxels):
    path.parent.mkdir(exist_ok=True)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(path))


def test_voxels_beside_a_header_are_part_of_what_was_read(tmp_path):
    """Of a ``.mhd`` only the header was looked at: with other voxels in the ``.raw`` beside it the old fingerprint was
    planned from, and labels were those of before."""
    label, image = tmp_path / "labels" / "a.mhd", np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    structure = np.zeros((8, 8, 8), dtype=np.uint8)
    structure[2:6, 2:6, 2:6] = 1
    write(tmp_path / "images" / "a.mhd", image)
    write(label, structure)
    task = load_task(tmp_path)
    keep_fingerprint(take_fingerprint(task), task)
    assert load_fingerprint(task) is not None
    header = label.stat()
    write(label, 3 * structure)
    os.utime(label, ns=(header.st_atime_ns, header.st_mtime_ns))
    assert load_fingerprint(task) is None
    assert sorted(load_task(tmp_path).labels) == [0, 3]


def test_channels_that_are_numbered_are_taken_by_their_numbers(tmp_path):
    """The columns of a table were channels in the order in which they stand: ``image_1`` before ``image_0`` exchanged
    the two that ``dataset.json`` declares."""
    for number in range(2):
        for kind in ("image", "label"):
            voxels = np.zeros((4, 4, 4), dtype=np.uint8)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{kind}{number}.nii.gz")
    declared = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "tumour": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    table = tmp_path / "cases.csv"
    table.write_text("case,image_1,image_0,label\na,image1.nii.gz,image0.nii.gz,label0.nii.gz\n", encoding="utf-8")
    (case,) = load_task(table).training
    assert [path.name for path in case["image"]] == ["image0.nii.gz", "image1.nii.gz"]


def test_regions_of_two_sides_are_not_mirrored_into_each_other():
    """Only labels were looked through for a left and a right; the values of regions have no such names."""
    case = CaseSizes(case="a", shape=(64, 64, 64), spacing=(1.0, 1.0, 1.0), voxels={0: 1, 1: 1, 2: 1})
    values = {0: "background", 1: "label_1", 2: "label_2", 3: "label_3"}
    regions = {"left lung": (1, 3), "right lung": (2,)}
    planned = plan(Fingerprint(task="Lungs", channels=("CT",), labels=values, cases=(case,), regions=regions))
    assert planned.config().augmentation.mirror.axes == (False, True, True)
    assert planned.config().inference.mirror is False


def key_of(folder, task, *steps):
    """Return the name under which the first case would be stored."""
    preprocessing = build_preprocessing([{"name": "ZScore"}])
    preprocessing.transforms = (*preprocessing.transforms, *steps)
    return CaseCache(folder / "cache", task, preprocessing).key_of(task.training[0])


def test_the_package_of_a_step_is_part_of_a_stored_cases_name(folder, tmp_path, monkeypatch):
    """Of a lab's own package only the file with the step itself counted: with another ``mean.py`` beside it, cases
    were trained on as the old one had prepared them."""
    package = tmp_path / "own_lab"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "mean": "MEAN = 1.0\n",
        "steps": "from own_lab.mean import MEAN\nclass Shift:\n    def __call__(self, case):\n        return case\n",
    }.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    step, task = importlib.import_module("own_lab.steps").Shift(), load_task(folder)
    before = key_of(tmp_path, task, step)
    assert key_of(tmp_path, task, step) == before
    (package / "mean.py").write_text("MEAN = 2.0\n", encoding="utf-8")
    assert key_of(tmp_path, task, step) != before


def test_the_reader_of_labels_is_part_of_a_stored_cases_name(folder, tmp_path, monkeypatch):
    """Readers were looked for among the images alone: labels in a format of one's own were those of its old reader."""
    (tmp_path / "own_reader.py").write_text("def read(path):\n    raise NotImplementedError\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task(folder)
    task = replace(task, training=tuple({**case, "label": tmp_path / "a.own"} for case in task.training))
    (tmp_path / "a.own").write_bytes(b"voxels")
    with as_a_new_process():
        SUFFIXES.register(".own", importlib.import_module("own_reader").read)
        before = key_of(tmp_path, task)
        (tmp_path / "own_reader.py").write_text("def read(path):\n    return None\n", encoding="utf-8")
        assert key_of(tmp_path, task) != before


def test_a_mended_copy_of_a_table_keeps_its_folds(folder, tmp_path):
    """The copy is a folder in MSD's layout, which says no folds: nnU-Net's were made, in which other cases validate
    than in the table."""
    cases = load_task(folder).training
    (tmp_path / "table").mkdir()
    task = load_task(write_table(tmp_path / "table", cases))
    repaired = repair_task(check_task(task), tmp_path / "copy")
    assert read_splits(repaired.splits, [case["case"] for case in load_task(repaired.root).training]) == list(
        task.splits
    )
    assert f"the folds of the table are in {tmp_path / 'copy' / 'splits.json'}" in repaired.lines()[0]
