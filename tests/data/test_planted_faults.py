"""Every planted fault is reported at its case and by its kind, and nothing else is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from planted_faults import COPIES, FAULTS, Planter, draw_task, found_in, plant, plant_copy, save

from volseg.data import Split, check_task, folds, load_task, make_task
from volseg.data.checks.kinds import KINDS


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return draw_task(tmp_path_factory.mktemp("clean") / "Task90_Clean")


def copied(root, tmp_path):
    return shutil.copytree(root, tmp_path / root.name)


def ids_of(root):
    task = load_task(root)
    return [case["case"] for case in task.training], [case["case"] for case in task.test]


def test_the_clean_data_set_has_no_finding(clean):
    found, check = found_in(clean)
    assert found == {}
    assert set(check.verdicts.values()) == {"ok"}
    assert check.lines() == ["all 42 cases of Task90_Clean can be used (42 ok, 0 to look at, 0 bad)"]


CROPS = {"copy without a slice", "copy without three rows"}
"""Not found in drawn images: all have the same frame of air, so other cases resemble a crop more than its original."""


def assert_named(expected, found, *, but=frozenset()):
    """Assert that every planted case has one of the kinds that name its fault, and that no other case has any."""
    planted = {name for cases in expected.values() for name in cases}
    unnamed = {
        fault: {name: found.get(name) for name in cases}
        for fault, cases in expected.items()
        if not all(kinds & found.get(name, set()) for name, kinds in cases.items())
    }
    assert set(unnamed) == but, unnamed
    return planted


def test_every_planted_fault_is_named_at_its_case(tmp_path):
    root = draw_task(tmp_path / "Task90_Drawn", num_cases=200)
    expected = plant(root, *ids_of(root))
    found, check = found_in(root)
    planted = assert_named(expected, found, but=CROPS)
    originals = {name for name, kinds in found.items() if name not in planted and "image-copy" in kinds}
    assert 1 <= len(originals) <= len(COPIES)
    assert set().union(*(found[name] for name in originals)) <= {"image-copy", "same-label"}
    assert found.keys() - planted - originals == set()
    bad = {finding.case for finding in check.problems}
    assert {name for name, verdict in check.verdicts.items() if verdict == "bad"} == bad


@pytest.mark.real_data
def test_sound_real_cases_have_no_finding(msd_task04):
    found, _ = found_in(msd_task04)
    assert found == {"": {"intensity-mixed"}}


@pytest.mark.real_data
@pytest.mark.slow
def test_every_fault_planted_into_real_cases_is_named(msd_task04, tmp_path):
    root = tmp_path / "Task04_Planted"
    expected = plant_copy(msd_task04, root, seed=0)
    found, _ = found_in(root)
    # The real task mixes three scales: another one, a thousand times larger, may be one of them.
    planted = assert_named(expected, found, but={"another scale"})
    assert {kind for name in found.keys() - planted for kind in found[name]} <= {
        "image-copy",
        "same-label",
        "intensity-mixed",
    }


def draw_few(tmp_path, **changes):
    root = draw_task(tmp_path / "Task91_Few", num_cases=12, num_test=0, **changes)
    return root, ids_of(root)[0]


def edit_image(root, name, edit):
    Planter(root, name).change("image", edit)


def of_kind(root, kind):
    return [finding for finding in found_in(root)[1].findings if finding.kind == kind]


def as_ct(voxels):
    """Air at -1000, tissue at 100 to 200; the skin between them keeps a few values in the middle."""
    hounsfield = voxels.astype(np.int16)
    hounsfield[voxels == 0] = -1000
    hounsfield[0, 0, 0] = -1024
    return hounsfield


def test_a_ct_that_was_shifted_or_cut_off(tmp_path):
    root, names = draw_few(tmp_path, modality={"0": "CT"})
    for name in names:
        edit_image(root, name, as_ct)
    assert found_in(root)[0] == {}
    edit_image(root, names[0], lambda voxels: voxels + 1024)
    edit_image(root, names[1], lambda voxels: voxels.clip(-175, 250))
    found, _ = found_in(root)
    assert found == {names[0]: {"ct-offset"}, names[1]: {"ct-clipped"}}


def test_a_label_in_the_corner_lies_on_air(tmp_path):
    root, names = draw_few(tmp_path)

    def to_corner(voxels):
        moved = np.zeros_like(voxels)
        moved[:3, :9, :9] = 1
        return moved

    Planter(root, names[4]).change("label", to_corner)
    assert found_in(root)[0] == {names[4]: {"label-on-air", "label-cut"}}


def test_labels_that_are_in_no_case_or_in_few(tmp_path):
    labels = {"0": "background", "1": "Anterior", "2": "Posterior", "3": "Cyst", "4": "Stone"}
    root, names = draw_few(tmp_path, labels=labels)
    for name in names[:4]:
        Planter(root, name).change("label", lambda voxels: np.where(voxels == 2, 3, voxels).astype(np.uint8))
    assert [(one.case, one.kind, one.message) for one in found_in(root)[1].findings] == [
        ("", "label-rare", "3 (Cyst) in 4 of 12 cases"),
        ("", "label-missing", "4 (Stone)"),
    ]


def test_an_image_that_holds_labels_and_channels_that_are_one(tmp_path):
    root, names = draw_few(tmp_path, modality={"0": "T1", "1": "T2"})
    for name in names:
        edit_image(root, name, lambda voxels: np.stack([voxels, voxels[::-1]], -1))
    edit_image(root, names[2], lambda voxels: np.stack([voxels[..., 0]] * 2, -1))
    [same] = of_kind(root, "same-channels")
    assert (same.case, same.message) == (names[2], "channels 0 and 1")
    edit_image(root, names[3], lambda voxels: (voxels > 120).astype(np.uint8))
    assert [finding.case for finding in of_kind(root, "image-like-label")] == [names[3]]


def test_two_names_for_one_image_in_one_fold_are_a_remark(tmp_path):
    root, names = draw_few(tmp_path)
    one, other, *_ = folds(names)[0].validation
    for folder in ("imagesTr", "labelsTr"):
        shutil.copyfile(root / folder / f"{one}.nii.gz", root / folder / f"{other}.nii.gz")
    assert found_in(root)[0] == {one: {"same-image"}}
    split = [Split(training=(one,), validation=(other,))]
    checked = check_task(load_task(root), splits=split)
    assert [(finding.case, finding.kind) for finding in checked.findings] == [(one, "leak")]


def test_equal_bad_images_are_no_leak_and_several_scales_are_told_once(tmp_path):
    root, names = draw_few(tmp_path)
    for name in names[::4]:
        edit_image(root, name, lambda voxels: voxels * np.float32(1000))
    for name in names[1:3]:
        edit_image(root, name, np.zeros_like)
    assert found_in(root)[0] == {"": {"intensity-mixed"}, **{name: {"constant"} for name in names[1:3]}}


def test_many_orientations_are_told_once(tmp_path):
    root = make_task(tmp_path / "Task00_Made", num_cases=5, num_test=0)
    found, check = found_in(root)
    assert found[""] == {"orientation"}
    assert not check.problems
    assert "orientations: " in check.lines()[0]


def test_values_beyond_what_was_looked_for_and_ignored_ones(tmp_path):
    task = load_task(draw_few(tmp_path)[0])
    task = replace(task, labels={0: "background", 1: "Anterior"}, ignore=2)
    assert check_task(task).findings == ()
    full = load_task(task.root)
    first, *rest = full.training
    partial = replace(full, training=({**first, "labelled": (1,)}, *rest))
    [finding] = check_task(partial).findings
    assert (finding.case, finding.kind, finding.message) == (first["case"], "label-not-looked-for", "2")


def test_a_fault_of_one_channels_file_names_it(tmp_path):
    root, _ = draw_few(tmp_path, modality={"0": "T1", "1": "T2"})
    task = load_task(root)
    cases = []
    for case in task.training:
        stored = nibabel.load(case["image"])
        second = case["image"].with_name(f"{case['case']}_0001.nii.gz")
        save(second, np.asarray(stored.dataobj)[::-1].copy(), stored.affine)
        cases.append({**case, "image": (case["image"], second)})
    save(cases[3]["image"][1], np.zeros_like(np.asarray(stored.dataobj)), nibabel.load(cases[3]["image"][1]).affine)
    cases[4]["image"][1].unlink()
    findings = check_task(replace(task, training=tuple(cases))).findings
    assert {(finding.kind, finding.case, finding.file) for finding in findings if finding.severity == "bad"} == {
        ("constant", cases[3]["case"], cases[3]["image"][1]),
        ("missing-file", cases[4]["case"], cases[4]["image"][1]),
    }


def test_the_json_tells_everything(clean, tmp_path):
    root = copied(clean, tmp_path)
    names, _ = ids_of(root)
    FAULTS["NaN"][1](Planter(root, names[0]))
    FAULTS["empty label"][1](Planter(root, names[1]))
    check = found_in(root)[1]
    check.write(tmp_path / "check.json")
    told = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert told["format"] == "volseg data check, 1"
    assert told["counts"] == {"ok": 40, "look": 1, "bad": 1}
    assert {case["case"]: case["verdict"] for case in told["cases"]} == check.verdicts
    assert [list(finding) for finding in told["findings"]] == [
        ["case", "file", "kind", "severity", "message", "remedy"]
    ] * 2
    [nan, empty] = told["findings"]
    assert (nan["case"], nan["kind"], nan["severity"]) == (names[0], "not-finite", "bad")
    assert nan["file"] == str(root / "imagesTr" / f"{names[0]}.nii.gz")
    assert empty["message"] == "the label contains only background"
    assert told["data"]["median_spacing_mm"] == [1, 1, 1]
    assert told["data"]["labels"]["1"]["cases"] == 39


def test_the_page_has_every_kind_as_the_code_has_it():
    page = (Path(__file__).parents[2] / "docs" / "data-check.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert [[name, *row[:2], *row[3:]] for name, *row in rows if row[0] in ("bad", "look")] == [
        [f"`{name}`", kind.severity, kind.says, kind.remedy, kind.repaired] for name, kind in KINDS.items()
    ]
    assert all(row[3] for row in rows), "a kind needs a rule"


def test_every_kind_is_planted_or_found_by_a_test_of_its_own():
    """A kind that no test produces may never be reported."""
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []
