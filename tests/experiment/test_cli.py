import subprocess
import sys

import pytest
from typer.testing import CliRunner

from volseg.cli import app

VERBS = ["train", "validate", "predict", "quickstart", "data"]


@pytest.mark.parametrize("verb", [*VERBS[:4], "data make"])
def test_every_verb_has_help_with_an_example(verb):
    result = CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: volseg {verb}" in result.output


def test_train_then_validate_then_predict(config_file, task, tmp_path):
    run = tmp_path / "run"
    result = CliRunner().invoke(app, ["train", str(config_file), "--set", "training.epochs=1"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "| mean " in result.output
    assert f"volseg predict {run} IMAGES..." in result.output
    assert CliRunner().invoke(app, ["validate", str(run)], catch_exceptions=False).exit_code == 0
    arguments = ["predict", str(run), str(task / "imagesTs"), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert str(tmp_path / "out" / "synthetic_007.nii.gz") in result.output


def test_a_fault_is_one_message_without_traceback(config_file):
    command = [sys.executable, "-m", "volseg", "train", str(config_file), "--set", "trainin.epochs=1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "trainin: unknown key; did you mean 'training'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_data_make_writes_a_task(tmp_path):
    result = CliRunner().invoke(app, ["data", "make", str(tmp_path / "Task00_Made"), "--cases", "2", "--tests", "0"])
    assert result.exit_code == 0
    assert len(list((tmp_path / "Task00_Made" / "imagesTr").iterdir())) == 2


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output.startswith("volseg ")
