"""One rule finds pairs and channels in every arrangement, and refuses ambiguous ones."""

import json
import logging
import os

import nibabel
import numpy as np
import pytest
import SimpleITK

from volseg.data import check_cases
from volseg.data.case_store import cache_folder
from volseg.data.layouts import load_task, naming
from volseg.data.layouts.naming import group_channels
from volseg.data.readers import read_volume
from volseg.errors import DataError

NAMES = {"labels": {"background": 0, "lesion": 1}}


@pytest.fixture
def folder(tmp_path):
    """Return a function that creates empty files with these names in a folder, and a manifest."""

    def write(*names, manifest=NAMES, root="data"):
        for name in names:
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).touch()
        if manifest is not None:
            (tmp_path / root / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
        return tmp_path / root

    return write


def paired(root):
    """Return the files of each case, relative to the folder."""

    def shorten(paths):
        return [str(path.relative_to(root)) for path in (paths if isinstance(paths, tuple) else [paths])]

    task = load_task(root)
    return task.modalities, {case["case"]: [*shorten(case["image"]), *shorten(case["label"])] for case in task.training}


@pytest.mark.parametrize(
    ("images", "labels"),
    [("images", "labels"), ("image", "label"), ("imagesTr", "labelsTr"), ("Images", "Masks"), ("img", "segmentations")],
)
def test_two_folders(folder, images, labels):
    root = folder(f"{images}/a.nii.gz", f"{images}/b_1.mha", f"{labels}/a.nii", f"{labels}/b_1.nii.gz", "notes.txt")
    expected = {"a": [f"{images}/a.nii.gz", f"{labels}/a.nii"], "b_1": [f"{images}/b_1.mha", f"{labels}/b_1.nii.gz"]}
    assert paired(root) == (("image",), expected)
    assert load_task(root / images) == load_task(root.parent) == load_task(root)


@pytest.mark.parametrize(
    "names",
    [
        ("images/a.nii.gz", "labels/a_seg.nii.gz"),
        ("images/a_0000.nii.gz", "labels/a.nii.gz"),
        ("a.nii.gz", "a_seg.nii.gz"),
        ("a-img.nrrd", "a-Mask.nrrd"),
        ("a/image.nii.gz", "a/label.nii.gz"),
        ("a/a.nii.gz", "a/a.seg.nii.gz"),
    ],
)
def test_one_image_per_case_in_every_arrangement(folder, names):
    assert paired(folder(*names)) == (("image",), {"a": list(names)})


def test_a_folder_per_case_with_a_file_per_channel(folder):
    """As BraTS has them: named channels, in the order of the alphabet unless somebody declares another."""
    words = ("t1", "t1ce", "t2", "flair", "seg")
    root = folder(*(f"BraTS_{n}/BraTS_{n}_{word}.nii.gz" for n in (2, 10) for word in words))
    modalities, cases = paired(root)
    assert modalities == ("flair", "t1", "t1ce", "t2")
    assert list(cases) == ["BraTS_10", "BraTS_2"]
    assert cases["BraTS_2"] == [f"BraTS_2/BraTS_2_{word}.nii.gz" for word in ("flair", "t1", "t1ce", "t2", "seg")]
    folder(manifest={**NAMES, "channel_names": {"0": "T1", "1": "T1ce", "2": "T2", "3": "FLAIR"}})
    modalities, cases = paired(root)
    assert modalities == ("T1", "T1ce", "T2", "FLAIR")
    assert cases["BraTS_10"] == [f"BraTS_10/BraTS_10_{word}.nii.gz" for word in words]


def test_numbered_channels_beside_labels(folder):
    names = [f"images/a_{n:04d}.nii.gz" for n in (0, 1, 2)]
    root = folder(*names, "labels/a.nii.gz", manifest={**NAMES, "modality": ["T2", "ADC", "DWI"]})
    assert paired(root) == (("T2", "ADC", "DWI"), {"a": [*names, "labels/a.nii.gz"]})


def test_the_longest_case_that_an_image_begins_with_is_its_own(folder):
    pairs = {case: [f"{case}.nii.gz", f"{case}_seg.nii.gz"] for case in ("case_1", "case_10", "case_1_2")}
    assert paired(folder(*(name for pair in pairs.values() for name in pair)))[1] == pairs


def test_a_word_for_labels_may_end_the_name_of_a_case(folder):
    names = ("images/brain_mask.nii.gz", "labels/brain_mask.nii.gz")
    assert paired(folder(*names)) == (("image",), {"brain_mask": list(names)})


def test_a_folder_of_slices_is_an_image(folder):
    root = folder("images/a/1.dcm", "images/a/2.dcm", "labels/a.nii.gz", "p/x", manifest=NAMES)
    assert paired(root) == (("image",), {"a": ["images/a", "labels/a.nii.gz"]})
    root = folder("a/image/1.dcm", "a/label.nii.gz", root="other")
    assert paired(root) == (("image",), {"a": ["a/image", "a/label.nii.gz"]})


def test_images_without_labels_lie_in_a_folder_of_their_own(folder):
    root = folder("images/a_t1.nii", "images/a_t2.nii", "labels/a.nii", "imagesTs/z_t1.nii", "imagesTs/z_t2.nii")
    [test] = load_task(root).test
    assert test == {"case": "z", "image": (root / "imagesTs/z_t1.nii", root / "imagesTs/z_t2.nii")}


def test_what_a_yaml_file_declares(folder):
    root = folder("images/a.nii", "labels/a.nii", "images/b.nii", "labels/b.nii", manifest=None)
    text = "labels: {background: 0, edema: 1, core: 4}\nregions: {whole tumour: [edema, core], core: 4}\nignore: 9\n"
    (root / "task.yaml").write_text(text + "labelled: {b: [core]}\nmodality: [CT]\nname: Mine\n", encoding="utf-8")
    task = load_task(root)
    assert (task.name, task.modalities, task.ignore) == ("Mine", ("CT",), 9)
    assert task.labels == {0: "background", 1: "edema", 4: "core"}
    assert task.regions == {"whole tumour": (1, 4), "core": (4,)}
    assert [case.get("labelled") for case in task.training] == [None, (4,)]
    (root / "dataset.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"contains both dataset\.json and task\.yaml; keep one of them"):
        load_task(root)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("a.nii", "a_seg.nii", "b.nii"),
            r"1 file\(s\) have no partner: b\.nii; .* must begin with .* to imagesTs, or",
        ),
        (("a.nii", "a_seg.nii", "b_seg.nii"), r"1 file\(s\) have no partner: b_seg\.nii"),
        (("a.nii", "a_seg.nii", "a_mask.nii"), r"a_mask\.nii and a_seg\.nii are both labels of one case; keep one"),
        (("a.nii", "a.nii.gz", "a_seg.nii"), r"a\.nii and a\.nii\.gz are the same channel of one case; keep one"),
        (("a.nii", "a_t1.nii", "a_seg.nii"), r"channels \(no name\), t1: a has a\.nii, a_t1\.nii; needed: the same"),
        (("a_t1.nii", "a_t2.nii", "a_seg.nii", "b_t1.nii", "b_seg.nii"), r"not every case has one file for each of"),
        (("images/a.nii", "img/a.nii", "labels/a.nii"), r"has images, img, labels; needed: one folder of images, one"),
        (("images/a.nii", "labels/a.nii", "b.nii"), r"has images, labels, b\.nii; needed: .* and no other images"),
        (("a.nii", "a_seg.nii", "b/b.nii", "b/b_seg.nii"), r"\(a\.nii, a_seg\.nii, b\); arrange all cases in one way"),
        (("images/a.png", "labels/a.png"), r"no image with a label; needed: files with \.mha, .*, or DICOM"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(folder, names, message):
    with pytest.raises(DataError, match=message):
        load_task(folder(*names))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({**NAMES, "modality": ["T1", "T2"]}, r"declares the channels T1, T2, but the images have t1, t3; use"),
        ({**NAMES, "modality": ["CT"]}, r"declares the channels CT, but the images have t1, t3"),
        ({"ignore": 3}, r"declares 'ignore' without 'labels'; declare 'labels' too"),
    ],
)
def test_a_manifest_that_does_not_fit_the_files(folder, declared, message):
    with pytest.raises(DataError, match=message):
        load_task(folder("a_t1.nii", "a_t3.nii", "a_seg.nii", manifest=declared))


def save_label(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = np.zeros((10, 10, 12), np.int16)
    voxels.flat[: len(values)] = values
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def test_labels_that_nobody_named_are_read_once(folder, caplog, monkeypatch):
    read = []
    monkeypatch.setattr(cache_folder, "YOUNG_NS", -(10**18))
    monkeypatch.setattr(naming, "read_volume", lambda path: read.append(path.name) or read_volume(path))
    root = folder("images/a.nii.gz", "images/b.nii.gz", manifest=None)
    save_label(root / "labels/a.nii.gz", 1, 7)
    save_label(root / "labels/b.nii.gz", 3)
    with caplog.at_level(logging.INFO, logger="volseg.data"):
        task = load_task(root)
    assert task.labels == {0: "background", 1: "label_1", 3: "label_3", 7: "label_7"}
    assert "no file names the labels; the label maps contain 0 (background), 1 (label_1), 3 (label_3), 7" in caplog.text
    assert "Name them in" in caplog.text
    assert load_task(root).labels == task.labels
    assert sorted(read) == ["a.nii.gz", "b.nii.gz"]
    save_label(root / "labels/b.nii.gz", 2)
    os.utime(root / "labels/b.nii.gz", ns=(1, 1))  # whatever the clock's step
    assert load_task(root).labels == {0: "background", 1: "label_1", 2: "label_2", 7: "label_7"}
    assert read[2:] == ["b.nii.gz"]
    save_label(root / "labels/b.nii.gz", -1)
    with pytest.raises(DataError, match="is not a label map"):
        load_task(root)
    assert read[3:] == ["b.nii.gz"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), r"the 1 label maps of .* contain only background; label the structures"),
        (range(1, 1200), r"a\.nii\.gz has 1200 values; needed: a label map, with one integer per"),
        ((-1, 2), r"a\.nii\.gz is not a label map: it has 1 channel\(s\) with values from -1 to 2; needed: one"),
    ],
)
def test_label_maps_that_are_none(folder, values, message):
    root = folder("images/a.nii.gz", manifest=None)
    save_label(root / "labels/a.nii.gz", *values)
    with pytest.raises(DataError, match=message):
        load_task(root)


def test_a_label_map_that_cannot_be_read_is_left_to_the_check(folder):
    """The check reports all bad cases; requiring the files reports only the first."""
    root = folder("images/a.nii.gz", "images/b.nii.gz", "labels/a.nii.gz", manifest=None)
    save_label(root / "labels/b.nii.gz", 3)
    task = load_task(root, require_files=False)
    assert task.labels == {0: "background", 3: "label_3"}
    assert {problem.case for problem in check_cases(task.training[:1], task)} == {"a"}
    with pytest.raises(DataError, match=r"labels/a\.nii\.gz is truncated or damaged"):
        load_task(root)
    (root / "labels/b.nii.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"labels/a\.nii\.gz is truncated or damaged"):
        load_task(root, require_files=False)


def test_formats_may_be_mixed(tmp_path):
    """Every reader's format in one data set, and in one case."""
    rng = np.random.default_rng(0)
    for case, ending in enumerate((".nii.gz", ".nii", ".mha", ".mhd", ".nrrd", ".nhdr")):
        for channel, suffix in (("t1", ending), ("t2", ".nrrd")):
            image = SimpleITK.GetImageFromArray(rng.normal(size=(5, 6, 7)).astype(np.float32))
            SimpleITK.WriteImage(image, str(tmp_path / f"case{case}_{channel}{suffix}"))
        label = np.zeros((5, 6, 7), np.uint8)
        label[2:4, 2:4, 2:4] = 1
        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(label), str(tmp_path / f"case{case}_seg{ending}"))
    task = load_task(tmp_path)
    assert [case["case"] for case in task.training] == [f"case{number}" for number in range(6)]
    assert task.modalities == ("t1", "t2")
    assert check_cases(task.training, task) == []


def grouped(tmp_path, names, modalities):
    """Return the names of the files of each case."""
    images = [tmp_path / name for name in names]
    cases = group_channels(images, modalities)
    return {
        case["case"]: [path.name for path in case["image"]] if isinstance(case["image"], tuple) else case["image"].name
        for case in cases
    }


def test_numbers_and_names_of_channels(tmp_path):
    assert grouped(tmp_path, ["a_pre_t1.nii", "a_t1.nii"], ("t1", "pre_t1")) == {"a": ["a_t1.nii", "a_pre_t1.nii"]}
    numbered, named = ["a_0001.nii", "a_0000.nii.gz", "d_0007.nii"], ["b_T1.nii", "b_flair.mha", "c.nii"]
    names = [*numbered, *named, "patient/t1", "patient/FLAIR"]
    assert grouped(tmp_path, names, ("T1", "FLAIR")) == {
        "a": ["a_0000.nii.gz", "a_0001.nii"],
        "b": ["b_T1.nii", "b_flair.mha"],
        "c": "c.nii",  # holds all channels, or the check will say so
        "d_0007": "d_0007.nii",  # cases may be numbered: there is no d_0000
        "patient": ["t1", "FLAIR"],
    }


def test_one_channel(tmp_path):
    assert grouped(tmp_path, ["a_0000.nii", "b_0000.nii"], ("CT",)) == {"a": "a_0000.nii", "b": "b_0000.nii"}
    assert list(grouped(tmp_path, ["a_0000.nii", "a_0001.nii"], ("CT",))) == ["a_0000", "a_0001"]
    assert list(grouped(tmp_path, ["a_0000.nii", "b.nii"], ("CT",))) == ["a_0000", "b"]


def test_the_name_of_the_only_channel_is_no_part_of_a_cases_name(tmp_path):
    names = ["pat13_t1.nii.gz", "pat14-T1.mha", "pat15.nii", "t1.nii", "pat13_t2.nii.gz"]
    assert list(grouped(tmp_path, names, ("t1",))) == ["pat13", "pat14", "pat15", "t1", "pat13_t2"]
    both = ["pat13_t1.nii", "pat13.nii", "pat14_t1.nii"]
    assert list(grouped(tmp_path, both, ("T1",))) == ["pat13_t1", "pat13", "pat14"], "two cases have different names"
    assert grouped(tmp_path, [], ("T1",)) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a_0000.nii", "a_0001.nii"],
            r"a has 2 file\(s\): a_0000\.nii, a_0001\.nii; needed: one for each of the 3 channels, called a_0000, "
            r"a_0001 \.\.\. or ending in T1, T2, ADC; or one file with all channels, or a table \(CSV\)",
        ),
        (["a.nii", "a_T1.nii"], r"a has 2 file\(s\): a\.nii, a_T1\.nii"),
        (["a_T1.nii", "a_0000.nii"], r"a_T1\.nii and .*a_0000\.nii are both channel 0 of a; name only one"),
        (["a.nii", "a.mha"], r"a\.nii and .*a\.mha are both all channels of a; name only one"),
    ],
)
def test_channels_that_are_not_all_there(tmp_path, names, message):
    with pytest.raises(DataError, match=message):
        grouped(tmp_path, names, ("T1", "T2", "ADC"))
