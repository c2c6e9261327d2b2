"""`volseg postprocess`: from the validation cases of runs to a file, and from the file to other people's label maps."""

import shutil

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.checkpointing.folder import RunFolder
from volseg.cli import app
from volseg.data import load_task
from volseg.data.readers import read_label
from volseg.errors import ConfigError, DataError
from volseg.experiment import apply_postprocessing, determine_postprocessing, predict, train
from volseg.inference.postprocessing import Postprocessing


@pytest.fixture
def crossed(configured, task, tmp_path):
    """Return a folder with two finished folds whose predictions are the labels with a stray piece each."""
    folder = tmp_path / "crossed"
    labels = {case["case"]: case["label"] for case in load_task(task).training}
    for number in (0, 1):
        run = train(
            configured("training.epochs=1", f"split.fold={number}", f"output={folder / f'fold_{number}'}")
        ).folder
        for name in run.split().validation:
            label = nibabel.load(labels[name])
            voxels = np.asarray(label.dataobj).astype(np.uint8)
            assert not voxels[:2, :2, :2].any()
            voxels[0, 0, 0] = 1
            nibabel.save(nibabel.Nifti1Image(voxels, label.affine), run.validation / f"{name}.nii.gz")
    return folder


def test_runs_and_cross_validations_are_measured_and_label_maps_changed(crossed, task, tmp_path):
    runs = [RunFolder(crossed / f"fold_{number}") for number in (0, 1)]
    result = CliRunner().invoke(app, ["postprocess", str(crossed)])
    assert result.exit_code == 0, result.output
    assert "keep largest  all" in result.output
    measured = determine_postprocessing(crossed)
    assert set(measured.cases) == {name for run in runs for name in run.split().validation}
    assert len(determine_postprocessing(runs[0].path).cases) == len(runs[0].split().validation)

    output = tmp_path / "changed"
    arguments = ["postprocess", str(crossed), "--apply", str(runs[0].validation), "--output", str(output)]
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


def test_what_cannot_be_measured_or_changed_is_refused(crossed, task, tmp_path):
    with pytest.raises(ConfigError, match="is no run folder and no cross-validation"):
        determine_postprocessing(tmp_path)
    run = RunFolder(crossed / "fold_0")
    gone = run.validation / f"{run.split().validation[0]}.nii.gz"
    shutil.move(gone, tmp_path)
    with pytest.raises(DataError, match=f"lacks {gone}; write its predictions again: volseg validate {run.path}"):
        determine_postprocessing(crossed)
    shutil.move(tmp_path / gone.name, gone)
    determine_postprocessing(crossed)
    with pytest.raises(ConfigError, match="holds the label maps as they are"):
        apply_postprocessing(crossed, run.validation, run.validation)
    with pytest.raises(DataError, match="is no folder of label maps"):
        apply_postprocessing(crossed, tmp_path / "none", tmp_path / "out")
    with pytest.raises(DataError, match=r"\.nii\.gz: the label map holds"):
        apply_postprocessing(crossed, task / "imagesTr", tmp_path / "out")
    result = CliRunner().invoke(app, ["postprocess", str(crossed), "--apply", str(run.validation)])
    assert result.exit_code == 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / gone.name).write_text("somebody's", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{gone.name} exists; choose another path, or use --overwrite"):
        apply_postprocessing(crossed, run.validation, tmp_path / "out")
    assert (tmp_path / "out" / gone.name).read_text(encoding="utf-8") == "somebody's"
    again = [str(crossed), "--apply", str(run.validation), "-o", str(tmp_path / "out"), "--overwrite"]
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
