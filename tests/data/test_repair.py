"""A corrected copy contains every certain repair, and passes the check."""

import gzip
import hashlib
import json
import os
import shutil
from dataclasses import replace

import nibabel
import numpy as np
import pytest
from planted_faults import FAULTS, Planter, draw_task, moved, save, scaled

from volseg.data import check_task, folds, load_task, read_volume, repair_task
from volseg.data.checks import repair
from volseg.errors import DataError


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return draw_task(tmp_path_factory.mktemp("clean") / "Task90_Clean", num_cases=10, num_test=1)


@pytest.fixture
def root(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "Task90_Clean")


def bytes_of(root):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def repair_and_compare(root, **options):
    before = bytes_of(root)
    repaired = repair_task(check_task(load_task(root, require_files=False)), root.parent / "repaired", **options)
    assert bytes_of(root) == before
    assert [path.name for path in root.parent.iterdir() if "partial" in path.name] == []
    return repaired


def names_of(root):
    return [case["case"] for case in load_task(root).training]


def round_badly(voxels):
    return voxels.astype(np.float32) * np.float32(0.9998)


def test_what_needs_no_guess_is_corrected_and_checked_again(root):
    names = names_of(root)
    plants = {
        "affine": lambda case: case.place(moved(0.2, 0, 0), "label"),
        "label-fractions": lambda case: case.change("label", round_badly),
        "mirrored": FAULTS["qform mirrored"][1],
        "forms-disagree": FAULTS["qform moved"][1],
    }
    label = np.asarray(nibabel.load(root / "labelsTr" / f"{names[1]}.nii.gz").dataobj)
    for name, put in zip(names, plants.values(), strict=False):
        put(Planter(root, name))
    repaired = repair_and_compare(root)
    for folder in ("imagesTr", "labelsTr"):  # only a header was written again
        file = f"{folder}/{names[2]}.nii.gz"
        before, after = (gzip.decompress((top / file).read_bytes()) for top in (root, repaired.root))
        assert before[348:] == after[348:]
        assert before != after
    written = nibabel.load(repaired.root / "labelsTr" / f"{names[1]}.nii.gz")
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(written.dataobj), label)
    untouched = f"imagesTr/{names[5]}.nii.gz"
    assert (repaired.root / untouched).read_bytes() == (root / untouched).read_bytes()
    assert os.stat(repaired.root / untouched).st_nlink == 1
    assert [(row["case"], row["kind"]) for row in repaired.repaired] == [
        (names[0], "affine"),
        (names[1], "label-fractions"),
        (names[2], "mirrored"),
        (names[2], "mirrored"),
        (names[3], "forms-disagree"),
        (names[3], "forms-disagree"),
    ]
    assert repaired.left_out == repaired.kept_bad == ()
    again = check_task(load_task(repaired.root))
    assert again.findings == ()
    assert len(again.cases) == 11
    record = json.loads((repaired.root / "repaired.json").read_text(encoding="utf-8"))
    assert record["source"] == str(root)
    assert record["repaired"] == [dict(row) for row in repaired.repaired]


def test_a_label_without_a_place_takes_its_images_and_a_shear_switches_the_qform_off(root):
    bare, tilted = (Planter(root, name) for name in names_of(root)[:2])
    unplaced = nibabel.Nifti1Image(np.asarray(nibabel.load(bare.label).dataobj), None)
    unplaced.set_sform(None, code=0)
    unplaced.set_qform(None, code=0)
    nibabel.save(unplaced, bare.label)
    shear = np.eye(4)
    shear[0, 1] = 0.2  # a tilted gantry: no rotation, so no qform
    for path in (tilted.image, tilted.label):
        stored = nibabel.load(path)
        save(path, np.asarray(stored.dataobj), stored.affine @ shear, stored.affine)
    repaired = repair_and_compare(root)
    assert (repaired.repaired[0]["case"], repaired.repaired[0]["kind"]) == (bare.name, "affine")
    written = nibabel.load(repaired.root / "imagesTr" / f"{tilted.name}.nii.gz")
    assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == (1, 0)
    assert check_task(load_task(repaired.root)).findings == ()


UNSURE = {
    "half a voxel": lambda case: case.place(moved(0.5, 0, 0), "label"),
    "another size": lambda case: case.place(scaled(1, 1, 1.02), "label"),
    "probabilities": FAULTS["probabilities"][1],
    "undeclared": FAULTS["undeclared"][1],
    "NaN": FAULTS["NaN"][1],
    "damaged": FAULTS["image cut short"][1],
    "deleted": FAULTS["label deleted"][1],
    "swapped": FAULTS["swapped"][1],
}


def test_what_asks_for_somebody_who_knows_is_left_out_or_copied(root):
    names = tuple(names_of(root)[: len(UNSURE)])
    for name, put in zip(names, UNSURE.values(), strict=True):
        put(Planter(root, name))
    repaired = repair_and_compare(root)
    assert (repaired.repaired, repaired.left_out) == ((), names)
    assert not {*names} & {*names_of(repaired.root)}
    assert check_task(load_task(repaired.root)).problems == []
    shutil.rmtree(repaired.root)
    kept = repair_and_compare(root, keep_bad=True)
    deleted = names[list(UNSURE).index("deleted")]  # nothing is there to be copied
    assert kept.left_out == (deleted,)
    assert {*kept.kept_bad} == {*names} - {deleted}
    assert {finding.case for finding in check_task(load_task(kept.root)).problems} == {*kept.kept_bad}


def test_of_two_equal_cases_one_is_kept_unless_their_labels_differ(root):
    names = names_of(root)
    one, other, *_ = (split.validation[0] for split in folds(names))
    one, other = sorted((one, other))
    for folder in ("imagesTr", "labelsTr"):
        shutil.copyfile(root / folder / f"{one}.nii.gz", root / folder / f"{other}.nii.gz")
    repaired = repair_and_compare(root)
    assert [(row["case"], row["kind"]) for row in repaired.repaired] == [(one, "leak")]
    assert repaired.left_out == (other,)
    assert check_task(load_task(repaired.root)).findings == ()
    shutil.rmtree(repaired.root)
    Planter(root, other).change("label", lambda voxels: voxels[::-1].copy())
    assert repair_and_compare(root).left_out == (one, other)


def test_the_target_is_empty_and_apart_from_the_data(root, tmp_path):
    check = check_task(load_task(root))
    for target in (root, root / "inside", root.parent, tmp_path / "full"):
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "file").touch()
        with pytest.raises(DataError, match=r"is inside .* or contains it|is not an empty folder"):
            repair_task(check, target)
    (tmp_path / "empty").mkdir()
    assert repair_task(check, tmp_path / "empty").root == tmp_path / "empty"
    assert len(load_task(tmp_path / "empty").training) == 10


def test_what_fails_on_the_way_leaves_nothing(root, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    check = check_task(load_task(root))
    monkeypatch.setattr(repair.shutil, "copyfile", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        repair_task(check, tmp_path / "copy")
    monkeypatch.undo()
    for name in names_of(root):
        FAULTS["NaN"][1](Planter(root, name))
    with pytest.raises(DataError, match="no training case of Task90_Clean is left"):
        repair_task(check_task(load_task(root)), tmp_path / "copy")
    assert sorted(tmp_path.iterdir()) == before


def test_channels_in_files_of_their_own_and_other_formats_are_copied_whole(root, tmp_path):
    """A header with separate voxels becomes one file; an image of several files keeps them."""
    sitk = pytest.importorskip("SimpleITK")
    task = load_task(root)
    task = replace(task, modalities=("T1", "T2"), regions={"all": (2, 1), "front": (1,)}, ignore=9)
    cases = []
    for case in task.training:
        second = case["image"].with_name(f"{case['case']}_second.mhd")
        stored = nibabel.load(case["image"])
        image = sitk.GetImageFromArray(np.asarray(stored.dataobj)[::-1].T.copy())
        place = np.diag([-1.0, -1, 1, 1]) @ stored.affine
        image.SetOrigin(place[:3, 3].tolist())
        image.SetDirection(place[:3, :3].flatten().tolist())
        sitk.WriteImage(image, str(second))
        cases.append({**case, "image": (case["image"], second), "labelled": (1,)})
    task = replace(task, training=tuple(cases), test=())
    check = check_task(task)
    assert check.problems == []
    repaired = repair_task(check, tmp_path / "copy")
    declared = json.loads((repaired.root / "dataset.json").read_text(encoding="utf-8"))
    name = cases[0]["case"]
    assert declared["training"][0] == {
        "case": name,
        "image": [f"imagesTr/{name}_0000.nii.gz", f"imagesTr/{name}_0001.mha"],
        "label": f"labelsTr/{name}.nii.gz",
        "labelled": [1],
    }
    assert (declared["regions"], declared["ignore"]) == ({"all": [2, 1], "front": [1]}, 9)
    files = [repaired.root / file for file in declared["training"][0]["image"]]
    assert read_volume(files).equal(read_volume(cases[0]["image"]))
    again = load_task(repaired.root)
    assert (again.labels, again.regions, again.ignore) == (task.labels, task.regions, task.ignore)
    assert again.training[0] == {
        "case": name,
        "image": tuple(files),
        "label": again.training[0]["label"],
        "labelled": (1,),
    }
    assert [(one.case, one.kind) for one in check_task(again).findings] == [
        (one.case, one.kind) for one in check.findings
    ]
