"""Two frames or visits of one patient fell into training and validation without a warning: the Dice was too high.
Splits are by patient if a column, DICOM or names show several cases of one, and given splits are checked."""

import json
import re
import shutil

import nibabel
import numpy as np
import pytest
import yaml
from planted_faults import save, write_manifest
from typer.testing import CliRunner
from volume_files import write_dicom

from tests.experiment.conftest import CONFIG
from volseg import experiment
from volseg.cli import app
from volseg.data import check_task, load_task, repair_task
from volseg.data.groups import assign_patients, propose_groups
from volseg.errors import ConfigError, DataError
from volseg.experiment.cases import choose_cases
from volseg.experiment.several_runs import plan_folds

FRAMES = [f"patient{number:03}_frame{frame:02}" for number in range(1, 7) for frame in (1, 12)]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def draw(seed):
    rng = np.random.default_rng(seed)
    label = np.zeros((16, 16, 15), np.uint8)
    label[4:12, 4:8, 4:12] = 1
    return (label * 50 + rng.normal(100, 10, label.shape)).astype(np.float32), label


def make(root, names, **entries):
    """Write a data set in MSD's layout, with additional ``entries`` of its cases."""
    training = []
    for place, name in enumerate(names):
        files = {"image": f"imagesTr/{name}.nii.gz", "label": f"labelsTr/{name}.nii.gz"}
        for file, voxels in zip(files.values(), draw(place), strict=True):
            save(root / file, voxels, np.eye(4))
        training.append(files | {key: values[place] for key, values in entries.items()})
    return write_manifest(root, names, [], labels={"0": "background", "1": "heart"}, training=training)


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "Task27_Frames", FRAMES)


def patients_of(names):
    return {name.partition("_")[0] for name in names}


def write_config(path, root, **split):
    content = {**CONFIG, "data": {"root": str(root)}, "output": str(path.parent / "run"), "split": split}
    content |= {"training": {"epochs": 1, "iterations": 1}, "device": "cpu"}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def write_cut_split(path):
    """Write one fold in which patient001 trains and validates."""
    held_out = ["patient001_frame01", "patient002_frame01", "patient002_frame12"]
    kept = [name for name in FRAMES if name not in held_out]
    path.write_text(json.dumps([{"train": kept, "val": held_out}]), encoding="utf-8")
    return path


def test_configure_sets_evident_groups_with_the_reason(frames, tmp_path):
    said = call("configure", frames, "-o", tmp_path / "plan.yaml")
    assert said.exit_code == 0, said.output
    assert re.search(r"patients +6, by \^\(patient", said.output)
    text = " ".join((tmp_path / "plan.yaml").read_text(encoding="utf-8").replace("#", " ").split())
    assert "12 cases are of 6 patients: patient001_frame01 and patient001_frame12 are of the same one" in text
    config = experiment.load_config(tmp_path / "plan.yaml")
    folds = plan_folds(config, load_task(frames))
    assert len(folds) == 5
    assert sorted(name for fold in folds for name in fold.split.validation) == FRAMES
    for fold in folds:
        assert not patients_of(fold.split.training) & patients_of(fold.split.validation)


def test_every_fold_of_a_cross_validation_keeps_patients_together(frames, tmp_path):
    config = write_config(tmp_path / "c.yaml", frames, num_folds=2, group=r"^(patient\d+)")
    done = call("cross-validate", config)
    assert done.exit_code == 0, done.output
    for number in range(2):
        [split] = json.loads((tmp_path / "run" / f"fold_{number}" / "split.json").read_text(encoding="utf-8"))
        assert not patients_of(split["train"]) & patients_of(split["val"])
    assert "6 patients of 12 cases" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_given_folds_are_kept_and_a_cut_patient_is_warned_about(frames, tmp_path, caplog):
    split = write_cut_split(tmp_path / "splits.json")
    config = write_config(tmp_path / "c.yaml", frames, file=str(split), group=r"^(patient\d+)")
    trained = call("train", config)
    assert trained.exit_code == 0, trained.output
    warning = "1 patient(s) both train and validate, of 6 patients of 12 cases"
    assert [record.levelname for record in caplog.records if warning in record.getMessage()] == ["WARNING"]
    assert "patient001_frame12 trains and patient001_frame01 validates" in caplog.text
    assert warning in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_config_without_a_group_is_warned_about_unless_it_says_none(frames, tmp_path):
    def patients(**split):
        return choose_cases(experiment.load_config(write_config(tmp_path / "c.yaml", frames, **split))).patients

    assert "set split.group to this, or to none" in patients().warning
    assert patients(group="none").warning == patients(group="none").summary == ""
    assert not patients(group=r"(patient\d+)").warning


def test_fewer_patients_than_folds_are_refused_with_both_numbers(frames, tmp_path):
    config = experiment.load_config(write_config(tmp_path / "c.yaml", frames, num_folds=7, group=r"^(patient\d+)"))
    with pytest.raises(
        DataError, match=r"7 folds of 6 patients \(12 cases, by split.group\); set split.num_folds to 6"
    ):
        choose_cases(config)
    with pytest.raises(DataError, match=r"5 folds of 1 patients .*set split.validation to none"):
        choose_cases(experiment.load_config(write_config(tmp_path / "d.yaml", frames, group="^(patient)")))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (r"^(patient\d+", "is not a regular expression"),
        (r"^(patient)(\d+)", "has 2 groups in parentheses; needed: one"),
        (r"^(?:patient\d+)", "has 0 groups in parentheses; needed: one"),
        ("patient", r"which is not a column of Task27_Frames.*one group in parentheses, such as"),
        (r"^patient\d+", r"which is not a column"),
        (r"^(patient00[1-5])", r"finds no patient in 2 of 12 cases: 'patient006_frame01', 'patient006_frame12'"),
        (r"^patient\d+_(x?)", "finds no patient in 12 of 12 cases"),
        ("PatientID", "no DICOM PatientID is known for 12 of 12 cases"),
        ("", "split.group"),
    ],
)
def test_an_invalid_group_is_refused(frames, tmp_path, group, said):
    with pytest.raises((ConfigError, DataError), match=f"(?s){said}"):
        choose_cases(experiment.load_config(write_config(tmp_path / "c.yaml", frames, group=group)))


def test_the_check_finds_cut_patients_of_a_split_and_proposes_a_group(frames, tmp_path):
    plain = call("data", "check", frames)
    assert "several cases belong to one patient" in plain.output
    assert "split.group: ^(patient[-_ ]?\\d+)" in plain.output
    split = write_cut_split(tmp_path / "splits.json")
    for words in ([], ["--group", r"^(patient\d+)"]):
        found = call("data", "check", frames, "--split", split, "--json", *words)
        kinds = [(one["kind"], one["case"]) for one in json.loads(found.stdout)["findings"]]
        assert ("patient-cut", "patient001_frame12") in kinds
        assert len([kind for kind, _ in kinds if kind.startswith("patient")]) == 1
    silent = call("data", "check", frames, "--split", split, "--group", "none", "--json")
    assert "patient" not in str([one["kind"] for one in json.loads(silent.stdout)["findings"]])


def write_table(path, root, **columns):
    names = ["case", "image", "label", *columns]
    rows = [
        [name, f"{root}/imagesTr/{name}.nii.gz", f"{root}/labelsTr/{name}.nii.gz"]
        + [values[place] for values in columns.values()]
        for place, name in enumerate(FRAMES)
    ]
    path.write_text("\n".join(",".join(row) for row in [names, *rows]) + "\n", encoding="utf-8")
    return path


MIXED = ["p1", "p2", "p3", "p4", "p5", "p1", "p2", "p3", "p4", "p5", "p6", "p6"]


@pytest.mark.parametrize("column", ["Patient_ID", "subject", "participant"])
def test_a_column_of_patients_is_evident_and_precedes_names(frames, tmp_path, column):
    table = write_table(tmp_path / "cases.csv", frames, **{column: MIXED})
    assert call("configure", table, "-o", tmp_path / "plan.yaml").exit_code == 0
    config = experiment.load_config(tmp_path / "plan.yaml")
    assert config.split.group.casefold() == column.casefold()
    by_name = dict(zip(FRAMES, MIXED, strict=True))
    for fold in plan_folds(config, load_task(table)):
        sides = [{by_name[name] for name in side} for side in (fold.split.training, fold.split.validation)]
        assert not sides[0] & sides[1]


def test_a_table_of_folds_is_checked_by_its_column(frames, tmp_path):
    folds = [str(place % 2) for place in range(len(FRAMES))]
    table = write_table(tmp_path / "cases.csv", frames, patient=MIXED, fold=folds)
    found = [finding for finding in check_task(load_task(table)).findings if finding.kind == "patient-cut"]
    assert len(found) == 6  # all: the two cases of each patient have an odd and an even place
    told = choose_cases(experiment.load_config(write_config(tmp_path / "c.yaml", table))).patients
    assert "train and validate" in told.warning
    assert "the split is given" in told.warning


def test_names_are_ignored_if_a_column_has_one_case_per_patient(frames, tmp_path):
    table = write_table(tmp_path / "cases.csv", frames, patient=[f"p{place}" for place in range(12)])
    assert propose_groups(load_task(table)) is None


@pytest.mark.parametrize("empty", ["", "n/a", "Anonymous"])
def test_a_column_with_gaps_is_not_proposed(frames, tmp_path, empty):
    table = write_table(tmp_path / "cases.csv", frames, patient=[empty, *MIXED[1:]])
    assert propose_groups(load_task(table)).group.startswith("^(patient")
    if not empty:
        with pytest.raises(DataError, match="the column 'patient' is empty for 1 of 12 cases: 'patient001_frame01'"):
            assign_patients(load_task(table), "patient")


def test_entries_of_a_manifest_name_patients_and_a_repaired_copy_keeps_them(tmp_path):
    root = make(tmp_path / "Task28_Entries", [f"case_{place:02}" for place in range(12)], patient=MIXED)
    assert propose_groups(load_task(root)).group == "patient"
    repaired = repair_task(check_task(load_task(root)), tmp_path / "repaired")
    assert assign_patients(load_task(repaired.root), "patient") == assign_patients(load_task(root), "patient")


def test_a_mapping_in_the_manifest_names_patients(frames, tmp_path):
    root = shutil.copytree(frames, tmp_path / "Task27_Frames")
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    patients = dict(zip(FRAMES, MIXED, strict=True))
    (root / "dataset.json").write_text(json.dumps(declared | {"patients": patients}), encoding="utf-8")
    assert assign_patients(load_task(root), propose_groups(load_task(root)).group) == patients
    (root / "dataset.json").write_text(json.dumps(declared | {"patients": {"nobody": "p1"}}), encoding="utf-8")
    with pytest.raises(DataError, match="'patients' names 'nobody'"):
        load_task(root)


def test_the_patients_of_dicom_headers_are_evident(tmp_path):
    root = tmp_path / "dicom"
    for seed, (name, patient) in enumerate(zip("abcdefgh", [*"1123344", "5 "], strict=True)):
        image, label = draw(seed)
        (root / f"scan{name}").mkdir(parents=True)
        write_dicom(root / f"scan{name}" / "image", image.astype(np.int16), np.eye(4), _0010_0020=f"P{patient}")
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), root / f"scan{name}" / "label.nii.gz")
    task = load_task(root)
    proposed = propose_groups(task)
    assert (proposed.group, proposed.evident, proposed.num_patients) == ("PatientID", True, 5)
    expected = dict(
        zip([f"scan{name}" for name in "abcdefgh"], ["P1", "P1", "P2", "P3", "P3", "P4", "P4", "P5"], strict=True)
    )
    assert assign_patients(task, "PatientID") == expected


def test_possible_groups_are_reported_and_not_set(tmp_path, caplog):
    names = [f"MMS_{number:03}_{visit:02}" for number in range(6) for visit in (1, 2)]
    root = make(tmp_path / "Task29_Possible", names)
    assert call("configure", root, "-o", tmp_path / "plan.yaml").exit_code == 0
    assert experiment.load_config(tmp_path / "plan.yaml").split.group is None
    assert "12 cases may be of 6 patients" in caplog.text
    said = call("data", "check", root)
    # A kind of the check: "patients-possible".
    assert re.search("look +data set +patients-possible +several cases may belong to one patient", said.output)
    assert "patient" not in call("data", "check", root, "--group", "none").output
