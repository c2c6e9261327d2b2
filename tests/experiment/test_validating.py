"""A run is validated again with other settings, and decides which steps `volseg postprocess` keeps."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.checkpointing.job_folder import only_process_in
from volseg.cli import app
from volseg.data import load_task
from volseg.data.readers import read_label
from volseg.errors import ConfigError, DataError
from volseg.evaluation.summary import read_summary
from volseg.experiment import RunFolder, apply_postprocessing, determine_postprocessing, predict, train, validate
from volseg.inference.postprocessing import Postprocessing
from volseg.workflow.validation import Validation


@pytest.fixture
def crossed(cross_validated, tmp_path):
    """Return a copy of a cross-validation that may be changed."""
    return shutil.copytree(cross_validated, tmp_path / "cv")


def test_other_settings_go_to_a_folder_that_is_called_by_them(crossed, tmp_path):
    run = RunFolder(crossed / "fold_0")
    own = (run.validation / "summary.json").read_bytes()
    settings = ["inference.mirror=true", "inference.window=[16, 16, 24]", "device=cpu"]
    validated = validate(run, overrides=settings)
    named = run.path / "validation_inference.window=16x16x24_inference.mirror=true"
    assert len(list(named.glob("*.nii.gz"))) == len(run.split().validation)
    assert read_summary(named / "summary.json")["mean"] == validated.summary["mean"]
    assert (run.validation / "summary.json").read_bytes() == own
    with pytest.raises(ConfigError, match=r"mirror=true/summary\.json exists; use --overwrite to replace it"):
        validate(run, overrides=settings)
    with pytest.raises(ConfigError, match=r"validation/summary\.json exists"):
        validate(run)
    with (
        only_process_in(run.validation),
        pytest.raises(ConfigError, match=r"validation is in use by process .* --outp"),
    ):
        validate(run, overwrite=True)
    assert validate(run, overwrite=True).summary["mean"] == json.loads(own)["mean"]
    with pytest.raises(ConfigError, match=r"does not apply to a trained network.*metrics, evaluation, data\.root"):
        validate(run, overrides=["network.channels=[8]"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.nii.gz").touch()
    with pytest.raises(ConfigError, match=r"mine/a\.nii\.gz exists"):
        validate(run, output=tmp_path / "mine")


def test_a_validation_that_is_interrupted_leaves_the_one_before(crossed, monkeypatch):
    """Its label maps were replaced one by one, under a summary of the old ones."""
    run = RunFolder(crossed / "fold_0")

    def contents():
        return {path.name: path.read_bytes() for path in run.validation.iterdir() if path.is_file()}

    before, evaluated, done = contents(), Validation._evaluated, []

    def interrupted(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(evaluated(*arguments))
        return done[0]

    with monkeypatch.context() as patched:
        patched.setattr(Validation, "_evaluated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            validate(run, overwrite=True)
    assert contents() == before
    assert any(run.validation.glob(".being_made/*.nii.gz"))
    again = validate(run, overwrite=True)
    assert contents() | {"summary.json": None} == before | {"summary.json": None}  # it names files of the copied folder
    assert not (run.validation / ".being_made").exists()
    files = [case["prediction_file"] for case in again.summary["metric_per_case"]]
    assert files == [
        case["prediction_file"] for case in read_summary(run.validation / "summary.json")["metric_per_case"]
    ]
    assert all(Path(file).parent == run.validation and Path(file).is_file() for file in files)


def test_the_training_validates_with_the_weights_that_are_kept(configured):
    """Averaged ones, gathered from slabs: a validation afterwards gives the same label maps, voxel by voxel."""
    slabs = "parallel={strategy: spatial, devices: [cpu, cpu]}"
    run = train(configured("training.epochs=1", "training.ema=0.7", slabs)).folder
    ended = {path.name: path.read_bytes() for path in run.validation.glob("*.nii.gz")}
    assert len(ended) == len(run.split().validation)
    validate(run, overwrite=True)
    assert {path.name: path.read_bytes() for path in run.validation.glob("*.nii.gz")} == ended


def test_every_fold_is_validated_on_its_own_cases(crossed):
    settings = ["validate", str(crossed), "--set", "inference.mirror=true"]
    result = CliRunner().invoke(app, settings, catch_exceptions=False)
    assert result.exit_code == 0
    assert "| mean " in result.stdout
    summary = read_summary(crossed / "validation_inference.mirror=true" / "summary.json")
    files = [case["prediction_file"] for case in summary["metric_per_case"]]
    assert len(files) == len(set(files)) == 6
    for number in range(3):
        own = crossed / f"fold_{number}" / "validation_inference.mirror=true"
        assert set(map(str, own.glob("*.nii.gz"))) <= set(files)
    with pytest.raises(ConfigError, match="use --overwrite to replace it"):
        CliRunner().invoke(app, settings, catch_exceptions=False)


def test_cases_come_from_the_cache_and_bad_ones_are_named(crossed, task, tmp_path, caplog):
    run = RunFolder(crossed / "fold_0")
    cache = f"data.cache={tmp_path / 'cache'}"
    with caplog.at_level("INFO"):
        validate(run, overrides=[cache], output=tmp_path / "one")
        validate(run, overrides=[cache], output=tmp_path / "two")
    assert "0 prepared case(s) found" in caplog.text
    assert "2 prepared case(s) found" in caplog.text
    damaged = shutil.copytree(task, tmp_path / task.name)
    name = run.split().validation[0]
    (damaged / "imagesTr" / f"{name}.nii.gz").write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"1 case\(s\) cannot be used:\n  {name}: "):
        validate(run, overrides=[f"data.root={damaged}"], output=tmp_path / "three")


@pytest.fixture
def two_folds(crossed, task):
    """Return a folder with two finished folds whose predictions are the labels with a stray piece each."""
    shutil.rmtree(crossed / "fold_2")
    labels = {case["case"]: case["label"] for case in load_task(task).training}
    for number in (0, 1):
        run = RunFolder(crossed / f"fold_{number}")
        for name in run.split().validation:
            label = nibabel.load(labels[name])
            voxels = np.asarray(label.dataobj).astype(np.uint8)
            assert not voxels[:2, :2, :2].any()
            voxels[0, 0, 0] = 1
            nibabel.save(nibabel.Nifti1Image(voxels, label.affine), run.validation / f"{name}.nii.gz")
    return crossed


def test_runs_and_cross_validations_are_measured_and_label_maps_changed(two_folds, task, tmp_path):
    runs = [RunFolder(two_folds / f"fold_{number}") for number in (0, 1)]
    result = CliRunner().invoke(app, ["postprocess", str(two_folds)])
    assert result.exit_code == 0, result.output
    assert "keep largest  all" in result.output
    measured = determine_postprocessing(two_folds)
    assert set(measured.cases) == {name for run in runs for name in run.split().validation}
    assert len(determine_postprocessing(runs[0].path).cases) == len(runs[0].split().validation)

    output = tmp_path / "changed"
    arguments = ["postprocess", str(two_folds), "--apply", str(runs[0].validation), "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Dice before" not in result.output  # measured already
    for case in load_task(task).training:
        if case["case"] in runs[0].split().validation:
            changed, label = (nibabel.load(path) for path in (output / f"{case['case']}.nii.gz", case["label"]))
            np.testing.assert_array_equal(np.asarray(changed.dataobj), np.asarray(label.dataobj))
            np.testing.assert_array_equal(changed.affine, label.affine)

    runs[0].forget_validation()  # as a training that goes on does
    assert not runs[0].postprocessing_file.exists()


def test_what_cannot_be_measured_or_changed_is_refused(two_folds, task, tmp_path):
    with pytest.raises(ConfigError, match="is neither a run folder nor a cross-validation"):
        determine_postprocessing(tmp_path)
    run = RunFolder(two_folds / "fold_0")
    gone = run.validation / f"{run.split().validation[0]}.nii.gz"
    shutil.move(gone, tmp_path)
    with pytest.raises(DataError, match=f"lacks {gone}; write it again: volseg validate {run.path} --overwrite"):
        determine_postprocessing(two_folds)
    shutil.move(tmp_path / gone.name, gone)
    determine_postprocessing(two_folds)
    with pytest.raises(ConfigError, match="contains the original label maps"):
        apply_postprocessing(two_folds, run.validation, run.validation)
    with pytest.raises(DataError, match="is not a folder of label maps"):
        apply_postprocessing(two_folds, tmp_path / "none", tmp_path / "out")
    with pytest.raises(DataError, match=r"\.nii\.gz: the label map has the values"):
        apply_postprocessing(two_folds, task / "imagesTr", tmp_path / "out")
    result = CliRunner().invoke(app, ["postprocess", str(two_folds), "--apply", str(run.validation)])
    assert result.exit_code == 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / gone.name).write_text("somebody's", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{gone.name} exists; choose another path, or use --overwrite"):
        apply_postprocessing(two_folds, run.validation, tmp_path / "out")
    assert (tmp_path / "out" / gone.name).read_text(encoding="utf-8") == "somebody's"
    again = [str(two_folds), "--apply", str(run.validation), "-o", str(tmp_path / "out"), "--overwrite"]
    assert CliRunner().invoke(app, ["postprocess", *again]).exit_code == 0
    assert (tmp_path / "out" / gone.name).read_bytes() != b"somebody's"


def test_a_run_keeps_the_largest_component_of_the_labels_that_its_config_names(configured, own_run, task, tmp_path):
    images = sorted((task / "imagesTr").iterdir())[:2]
    name, steps = "Anterior", ["inference.keep_largest=[Anterior]"]
    plain = predict(own_run, images, tmp_path / "plain", overrides=["inference.keep_largest=[]"])
    kept = predict(own_run, images, tmp_path / "kept", overrides=steps)
    order = Postprocessing.keep_largest(own_run.task(), [name])
    changes = 0
    for case, path in plain.label_maps.items():
        before = read_label(path)
        assert np.array_equal(read_label(kept.label_maps[case]), order(before))
        changes += int((order(before) != before).sum())
    assert changes, "the untrained network predicts no stray component, and nothing is tested"
    with pytest.raises(ConfigError, match=r"keep_largest: no label is called 'Anterio'"):
        train(configured("training.epochs=1", "inference.keep_largest=[Anterio]", f"output={tmp_path / 'typo'}"))
    assert not (tmp_path / "typo" / "history.jsonl").exists()
