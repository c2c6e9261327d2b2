import json
import logging
import os

import pytest

from volseg.data.layouts import load_task
from volseg.errors import DataError


def test_a_plain_task(msd):
    root = msd()
    task = load_task(root)
    assert task.name == "Task11_Test"
    assert task.root == root
    assert task.modalities == ("MRI",)
    assert task.labels == {0: "background", 1: "Anterior", 2: "Posterior"}
    assert task.foreground == {1: "Anterior", 2: "Posterior"}
    assert (task.num_channels, task.num_classes) == (1, 3)
    assert [case["case"] for case in task.training] == ["case_a", "case_b"]  # sorted, as the folds need them
    assert task.training[0]["image"] == root / "imagesTr" / "case_a.nii.gz"
    assert task.training[0]["label"] == root / "labelsTr" / "case_a.nii.gz"
    assert task.test == ({"case": "case_c", "image": root / "imagesTs" / "case_c.nii.gz"},)


@pytest.mark.parametrize("given", [".", "..", "imagesTr", "labelsTr", "dataset.json"])
def test_one_level_above_or_below(msd, given):
    root = msd()
    assert load_task(root / given).training == load_task(root).training


def test_archive_within_a_folder_of_its_name(msd, tmp_path):
    root = msd("Task11_Test/Task11_Test")
    assert load_task(tmp_path / "Task11_Test").root == root
    assert load_task(tmp_path).root == root


def test_the_quirks_of_the_real_files(msd, caplog):
    """What dataset.json of tasks 01, 04, 05 and 08 and macOS' tar have been seen to hold."""
    pair = {"image": " ./imagesTr/case_a.nii.gz", "label": "labelsTr/case_a.nii.gz"}
    shadow = {"image": "./imagesTr/._case_a.nii.gz", "label": "./labelsTr/._case_a.nii.gz"}
    root = msd(
        reference=" Vanderbilt University Medical Center",
        tensorImageSize="4D",
        quantitative=2,
        modality={"1": "ADC", "0": "T2"},
        labels={"2": "TZ ", "0": "background", "1": "PZ"},
        training=[pair, shadow],
        test=[{"image": "./imagesTs/case_c.nii.gz"}],
        numTest=140,
    )
    with caplog.at_level(logging.INFO, logger="volseg.data"):
        task = load_task(root)
    assert task.modalities == ("T2", "ADC")
    assert task.labels == {0: "background", 1: "PZ", 2: "TZ"}
    assert [case["case"] for case in task.training] == ["case_a"]
    assert [case["case"] for case in task.test] == ["case_c"]
    assert "numTest is 140, but 1 cases were found" in caplog.text


def test_labels_may_leave_gaps_and_channels_have_nnunets_key(msd):
    task = load_task(msd(labels={"0": "background", "7": "b", "3": "a"}, modality=..., channel_names={"0": "T1"}))
    assert (task.labels, task.modalities) == ({0: "background", 3: "a", 7: "b"}, ("T1",))


def test_without_a_list_of_cases_names_say_what_belongs_together(msd):
    listed = load_task(msd())
    assert load_task(msd(training=..., test=...)) == listed


def test_byte_order_mark(msd):
    root = msd("my_data")
    text = (root / "dataset.json").read_text(encoding="utf-8")
    (root / "dataset.json").write_text(text, encoding="utf-8-sig")
    task = load_task(root)
    assert (task.name, len(task.training)) == ("Test", 2)  # a folder without a number has the declared name


def test_tests_that_were_not_fetched_are_left_out(msd, caplog):
    root = msd(test=["./imagesTs/case_c.nii.gz", "./imagesTs/case_d.nii.gz"])
    assert [case["case"] for case in load_task(root).test] == ["case_c"]
    assert "leaving out 1 of 2 declared test images: their files do not exist" in caplog.text


def test_absent_files_are_counted_and_named(msd):
    root = msd()
    (root / "labelsTr/case_b.nii.gz").unlink()
    with pytest.raises(DataError, match=r"json lists 1 file\(s\) that do not exist: labelsTr/case_b\.nii\.gz; fetch"):
        load_task(root)
    assert len(load_task(root, require_files=False).training) == 2


def pair(image="imagesTr/a.nii.gz", label="labelsTr/a.nii.gz"):
    return {"image": image, "label": label}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": []}, r"lists no training cases; needed: .* 'training': \[\{'image'"),
        ({"training": None}, r"'training' should be a list of cases, got NoneType"),
        ({"training": ["imagesTr/a.nii.gz"]}, r"training\[0\] should name image and label, got 'imagesTr/a"),
        ({"training": [pair(), pair()]}, r"declares 1 case\(s\) more than once, first 'a'; keep each once"),
        ({"training": [pair("../a.nii.gz")]}, r"training\[0\] names '\.\./a\.nii\.gz'; needed: a path inside"),
        ({"training": [pair("imagesTr\\..\\..\\a.nii")]}, r"training\[0\] names .*; needed: a path inside"),
        ({"training": [pair("C:\\a.nii.gz")]}, r"training\[0\] names 'C:.*; needed: a path inside"),
        ({"training": [pair(label=" ")]}, r"training\[0\] names ''; needed: a path inside"),
        ({"test": ["imagesTs/case_a.nii.gz"]}, r"declares 1 case\(s\) more than once, first 'case_a'"),
        ({"labels": ...}, r"'labels' should map values to names .* or names to values, got None"),
        ({"labels": {"background": 0}}, r"declares the labels \{0: 'background'\}; needed: 0 .* one structure"),
        ({"labels": {"1": "a", "2": "b"}}, r"declares the labels \{1: 'a', 2: 'b'\}; needed: 0 for the background"),
        ({"labels": {"0": "b", "-1": "a"}}, r"of the label 'a' should be an integer from 0 to 16777215, got '-1'"),
        ({"labels": {"0": "b", "1": "a", "01": "c"}}, r"gives the value 1 to 'a' and to 'c'"),
        ({"labels": {"0": "b", "1": "a", "2": "a"}}, r"gives the name 'a' to several labels"),
        ({"labels": {"0": "background", "1": None}}, r"'labels' should name 1, got None; reports use the names"),
        ({"modality": {"0": ""}}, r"'modality' should name channel 0, got ''"),
        ({"training": [pair(), pair("imagesTr/b.nii.gz")]}, r"1 file\(s\) more than once, first labelsTr/a\.nii\.gz"),
        ({"training": [pair(label="imagesTr/a.nii.gz")]}, r"1 file\(s\) more than once, first imagesTr/a\.nii\.gz"),
        ({"training": [pair("imagesTr/" + "a" * 5000 + ".nii")]}, r"\(5013 characters\), which is not a valid path"),
        ({"training": [pair("imagesTr/\0.nii")]}, r"which is not a valid path"),
        ({"training": [pair("imagesTr/\ud800.nii")]}, r"which is not valid UTF-8"),
        ({"modality": ...}, r"'modality' should map the numbers 0, 1, 2 \.\.\. to names, got None"),
        ({"channel_names": {"0": "T1"}}, r"'channel_names' and 'modality' name different channels; keep one of them"),
    ],
)
def test_what_would_cost_a_training_is_refused(msd, changes, message):
    with pytest.raises(DataError, match=message):
        load_task(msd(**changes))


def test_folder_that_is_no_task(tmp_path):
    (tmp_path / "imagesTr").mkdir()
    with pytest.raises(DataError, match=r"is not a data set: neither it nor .* dataset\.json next to imagesTr and"):
        load_task(tmp_path)
    with pytest.raises(DataError, match="Task99 does not exist; name the folder of a data set"):
        load_task(tmp_path / "Task99")


def test_folder_with_several_tasks(msd, tmp_path):
    msd("Task11_Test")
    msd("Task12_Test")
    with pytest.raises(DataError, match="contains 2 data sets: Task11_Test, Task12_Test; name one"):
        load_task(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{,}", "cannot be read as JSON: .*line 1"), ("[]", "should contain a JSON object, got list")]
)
def test_manifest_that_is_no_json_object(tmp_path, text, message):
    (tmp_path / "dataset.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_task(tmp_path)


def test_links_to_another_disk_are_followed(msd, tmp_path):
    root = msd()
    os.rename(root / "imagesTr", tmp_path / "elsewhere")
    (root / "imagesTr").symlink_to(tmp_path / "elsewhere")
    assert len(load_task(root).training) == 2


@pytest.mark.real_data
def test_the_real_task(msd_task04):
    declared = json.loads((msd_task04 / "dataset.json").read_text(encoding="utf-8"))
    task = load_task(msd_task04)
    assert len(task.training) == declared["numTraining"] == 208
    assert task.labels == {0: "background", 1: "Anterior", 2: "Posterior"}
    assert task.training[0]["case"] == "hippocampus_001"
