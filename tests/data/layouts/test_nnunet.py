"""nnU-Net's raw data sets are read as by nnU-Net 2, and faults that it would meet later are reported."""

import json
import logging
from pathlib import Path

import pytest

from volseg.data.layouts import load_task
from volseg.errors import DataError

BRATS = {"background": 0, "whole tumor": [1, 2, 3], "tumor core": [2, 3], "enhancing tumor": [3]}


@pytest.fixture
def raw(tmp_path):
    """Return a function that writes a raw data set of two cases with two channels, with the given changes."""

    def write(folder="Dataset011_Test", *, cases=("b", "a"), channels=(0, 1), ending=".nii.gz", **changes) -> Path:
        root = tmp_path / folder
        declared = {
            "channel_names": {"0": "T1", "1": "T2"},
            "labels": {"background": 0, "PZ": 1, "TZ": 2},
            "numTraining": len(cases),
            "file_ending": ending,
        }
        declared = {key: value for key, value in (declared | changes).items() if value is not ...}
        names = [f"imagesTr/{case}_{channel:04d}" for case in cases for channel in channels]
        names += [f"labelsTr/{case}" for case in cases] + [f"imagesTs/t_{channel:04d}" for channel in channels]
        root.mkdir(exist_ok=True)
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / f"{name}{ending}").touch()
        (root / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
        return root

    return write


def test_a_data_set_with_a_file_per_channel(raw):
    root = raw()
    task = load_task(root)
    assert (task.name, task.root, task.modalities) == ("Dataset011_Test", root, ("T1", "T2"))
    assert (task.labels, task.regions, task.ignore) == ({0: "background", 1: "PZ", 2: "TZ"}, {}, None)
    assert [case["case"] for case in task.training] == ["a", "b"]  # sorted, as nnU-Net's folds need them
    assert task.training[0] == {
        "case": "a",
        "image": (root / "imagesTr/a_0000.nii.gz", root / "imagesTr/a_0001.nii.gz"),
        "label": root / "labelsTr/a.nii.gz",
    }
    assert task.test == ({"case": "t", "image": (root / "imagesTs/t_0000.nii.gz", root / "imagesTs/t_0001.nii.gz")},)
    assert load_task(root / "imagesTr") == load_task(root.parent) == task


def test_one_channel_is_one_path(raw):
    root = raw(channel_names={"0": "CT"}, channels=(0,), ending=".nrrd")
    [case, _] = load_task(root).training
    assert (case["case"], case["image"], case["label"]) == (
        "a",
        root / "imagesTr/a_0000.nrrd",
        root / "labelsTr/a.nrrd",
    )


def test_a_file_of_all_channels_is_one_path(raw):
    root = raw(channels=(0,))
    assert load_task(root).training[0]["image"] == root / "imagesTr/a_0000.nii.gz"


@pytest.mark.parametrize(
    ("changes", "regions", "names"),
    [
        (
            {"labels": BRATS, "regions_class_order": [1, 2, 3]},
            {"whole tumor": (1, 2, 3), "tumor core": (2, 3), "enhancing tumor": (3,)},
            {0: "background", 1: "label_1", 2: "label_2", 3: "enhancing tumor"},
        ),
        (  # KiTS: the middle region is painted with the largest value
            {
                "labels": {"background": 0, "kidney": [1, 2, 3], "masses": [2, 3], "tumor": 2},
                "regions_class_order": [1, 3, 2],
            },
            {"kidney": (1, 2, 3), "masses": (3, 2), "tumor": (2,)},
            {0: "background", 1: "label_1", 2: "tumor", 3: "label_3"},
        ),
        (  # a region's value among several of its own is the one that nnU-Net paints with
            {"labels": {"background": 0, "organ": [1, 2, 3], "lesion": 3}, "regions_class_order": [2, 3]},
            {"organ": (2, 1, 3), "lesion": (3,)},
            {0: "background", 1: "label_1", 2: "label_2", 3: "lesion"},
        ),
    ],
    ids=["BraTS", "KiTS", "chosen value"],
)
def test_regions_keep_their_order_and_the_value_that_each_is_painted_with(raw, changes, regions, names):
    task = load_task(raw(**changes))
    assert task.regions == regions
    assert list(task.regions) == list(regions)
    assert task.labels == names


def test_values_may_be_digits_and_lists_of_one(raw):
    """nnU-Net turns values into numbers, and a list of one is no region."""
    task = load_task(raw(labels={"background": "0", "PZ": [2], "TZ": "1"}))
    assert (task.labels, task.regions) == ({0: "background", 1: "TZ", 2: "PZ"}, {})


def test_a_value_to_ignore(raw):
    task = load_task(raw(labels={"background": 0, "PZ": 1, "ignore": 2}))
    assert (task.labels, task.ignore) == ({0: "background", 1: "PZ"}, 2)
    task = load_task(raw(labels={**BRATS, "ignore": 4}, regions_class_order=[1, 2, 3]))
    assert (task.ignore, sorted(task.labels), list(task.regions)) == (4, [0, 1, 2, 3], list(BRATS)[1:])


def test_partially_labelled_cases(raw):
    first, second = load_task(raw(labelled={"b": ["TZ"]})).training
    assert "labelled" not in first
    assert second["labelled"] == (2,)


def test_a_wrong_count_is_said_and_files_that_are_no_images_are_ignored(raw, caplog):
    root = raw(numTraining=7)
    (root / "imagesTr/._a_0000.nii.gz").touch()  # macOS
    (root / "imagesTr/notes.txt").touch()
    with caplog.at_level(logging.INFO, logger="volseg.data"):
        task = load_task(root)
    assert [case["case"] for case in (*task.training, *task.test)] == ["a", "b", "t"]
    assert "numTraining is 7, but 2 cases were found" in caplog.text
    assert logging.WARNING in {record.levelno for record in caplog.records}


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("imagesTr/b_0000.nii.gz", "not every case has one file for each of the channels 0000, 0001: b has b_0001"),
        ("imagesTr/b_0001.nii.gz", "not every case has one file for each of the channels 0000, 0001: b has b_0000"),
        ("imagesTs/t_0000.nii.gz", "not every case has one file for each of the channels 0000, 0001: t has t_0001"),
        ("labelsTr/b.nii.gz", r"2 file\(s\) have no partner: imagesTr/b_0000"),
    ],
)
def test_a_missing_channel_or_label_is_refused(raw, gone, message):
    root = raw()
    (root / gone).unlink()
    with pytest.raises(DataError, match=message):
        load_task(root)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("imagesTr/b_0002.nii.gz", {}, "not every case has one file for each of the channels 0000, 0001, 0002: a has"),
        ("imagesTs/t_0001.nii.gz", {"channel_names": {"0": "CT"}, "channels": (0,)}, "one of the .* channels 0000"),
        ("imagesTr/c.nii.gz", {}, r"1 file\(s\) have no partner: imagesTr/c"),
        ("labelsTr/c.nii.gz", {}, r"1 file\(s\) have no partner: labelsTr/c"),
    ],
)
def test_files_that_nobody_declared_are_refused(raw, name, changes, message):
    """The second channel of a test image became a case of its own, with a prediction."""
    root = raw(**changes)
    (root / name).touch()
    with pytest.raises(DataError, match=message):
        load_task(root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": (), "channels": ()}, r"011_Test has a manifest without cases .*; needed: imagesTr and labelsTr, or"),
        ({"channels": (0, 2)}, r"declares the channels .*, but the images have 0000, 0002"),
        ({"channels": (1, 2)}, r"declares the channels .*, but the images have 0001, 0002"),
        ({"labels": {"background": 0, "PZ": 1.5}}, r"the value of the label 'PZ' should be an integer .*, got 1\.5"),
        ({"labels": {"background": 0, "all": [1, 0], "PZ": 1}}, r"the region 'all' contains \[0\]; needed: .* \[1\]"),
        ({"labels": {"background": 0, "all": [1, 1]}}, r"the region 'all' lists the value 1 twice"),
        ({"labels": {"background": 0, "all": []}}, r"the region 'all' has no values"),
        ({"labels": {"background": 0, "PZ": 1, "ignore": 0}}, r"gives the value 0 to 'background' and to 'ignore'"),
        ({"labels": {"background": 0, "PZ": 1}, "ignore": 1}, r"ignores 1, which is the label 'PZ'; use another"),
        ({"labels": BRATS, "regions_class_order": [1, 2]}, r"should list a value for each of the 3 regions, got \[1"),
        ({"labels": BRATS, "regions_class_order": [3, 2, 1]}, r"paints 'whole tumor' with 3; needed: one of \[1\]"),
        ({"labels": BRATS, "regions": {"x": [1]}}, r"declares regions in 'labels' and in 'regions'; keep one"),
        ({"labelled": {"c": [1]}}, r"'labelled' names 'c', an unknown case; known: a, b"),
        ({"labelled": {"a": ["P"]}}, r"a: 'labelled' contains 'P', which is not a structure of the task; did you mean"),
        ({"labelled": {"a": [0]}}, r"'labelled' contains 0, which is not a structure"),
        ({"labelled": {"a": []}}, r"'labelled' names no label; leave it out if all labels were annotated"),
        ({"labelled": ["a"]}, r"'labelled' should map case ids to lists of labels, got list"),
        (
            {"dataset": {"a": {"images": ["a.nii"], "label": "l.nii"}}},
            "under 'dataset', which volseg does not read; list them in",
        ),
    ],
)
def test_what_cannot_be_trusted_is_refused(raw, changes, message):
    with pytest.raises(DataError, match=message):
        load_task(raw(**changes))


def test_the_first_version_lists_images_that_lie_there_by_channel(tmp_path):
    for name in ("imagesTr/a_0000", "imagesTr/a_0001", "labelsTr/a", "imagesTs/t_0000", "imagesTs/t_0001"):
        path = tmp_path / f"{name}.nii.gz"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    declared = {
        "name": "Prostate",
        "modality": {"0": "T2", "1": "ADC"},
        "labels": {"0": "background", "1": "PZ"},
        "training": [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
        "test": ["./imagesTs/t.nii.gz"],
    }
    (tmp_path / "dataset.json").write_text(json.dumps(declared), encoding="utf-8")
    task = load_task(tmp_path)
    [case], [test] = task.training, task.test
    assert (case["case"], test["case"]) == ("a", "t")
    assert [path.name for path in case["image"]] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert [path.name for path in test["image"]] == ["t_0000.nii.gz", "t_0001.nii.gz"]
    (tmp_path / "imagesTr/a_0001.nii.gz").unlink()
    with pytest.raises(DataError, match=r"1 file\(s\) that do not exist: imagesTr/a_0001\.nii\.gz"):
        load_task(tmp_path)


@pytest.mark.parametrize("name", ["Dataset004_Hippocampus", "4"])
def test_a_data_set_that_lies_where_nnunet_looks_is_named(tmp_path, monkeypatch, name):
    folder = tmp_path / "raw" / "Dataset004_Hippocampus"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("nnUNet_raw", str(tmp_path / "raw"))
    with pytest.raises(DataError, match=f"{name} does not exist; .*; did you mean '{folder}'"):
        load_task(name)
    monkeypatch.delenv("nnUNet_raw")
    with pytest.raises(DataError, match=r"such as TaskNN_Name of the Decathlon$"):
        load_task(name)
