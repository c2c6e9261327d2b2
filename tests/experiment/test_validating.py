"""A run is validated again by other settings, into a folder of its own; nothing is replaced that nobody named."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.errors import ConfigError, DataError
from volseg.evaluation.summary import read_summary
from volseg.experiment import RunFolder, train, validate
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
    assert validate(run, overwrite=True).summary["mean"] == json.loads(own)["mean"]
    with pytest.raises(ConfigError, match=r"network is as it was trained with.*metrics, evaluation, data\.root"):
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


@pytest.mark.parametrize("settings", [(), ("parallel={strategy: spatial, devices: [cpu, cpu]}",)], ids=["one", "slabs"])
def test_the_training_validates_with_the_weights_that_are_kept(configured, settings):
    """Averaged ones, gathered from slabs: a validation afterwards gives the same label maps, voxel by voxel."""
    run = train(configured("training.epochs=2", "training.ema=0.7", *settings)).folder
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


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match="is no run folder and no cross-validation"):
        CliRunner().invoke(app, ["validate", str(tmp_path)], catch_exceptions=False)
