"""From a folder of cases to a trained network, without a config or with one that was planned."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.errors import ConfigError, DataError
from volseg.experiment import RunFolder, load_config

SMALL = {
    "training.epochs": 1,
    "training.iterations": 2,
    "network.filters": [4, 8, 8, 8],
    "inference.mirror": "false",
    "split.num_folds": 3,
    "device": "cpu",
}
QUICK = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def folder(task, tmp_path):
    """Return a copy of the task, whose folder may be written to."""
    return shutil.copytree(task, tmp_path / task.name)


def test_configure_then_train(folder, tmp_path):
    file = tmp_path / "mine.yaml"
    said = call("configure", folder, "-o", file, "--gpu-memory", "6GiB", "--name", "mine").output
    assert "6, 1 channel(s), 3 labels" in said
    assert f"volseg train {file}" in said
    config = load_config(file)
    assert (config.name, config.data.root) == ("mine", folder)
    assert (folder / ".volseg" / "fingerprint.json").is_file()
    result = call("train", file, "-o", tmp_path / "run", *QUICK)
    assert "| mean " in result.output
    network = json.loads((tmp_path / "run" / "network.json").read_text(encoding="utf-8"))
    assert str(config.network.spec()["strides"]) in str(network)


def test_the_second_plan_reads_no_case(folder, tmp_path):
    call("configure", folder, "-o", tmp_path / "one.yaml")
    for image in (folder / "imagesTr").iterdir():
        image.chmod(0o644)  # what changes no content is no change
    before = (folder / ".volseg" / "fingerprint.json").stat().st_mtime_ns
    call("configure", folder, "-o", tmp_path / "two.yaml", "--preset", "resenc")
    assert (folder / ".volseg" / "fingerprint.json").stat().st_mtime_ns == before
    assert load_config(tmp_path / "two.yaml").network.name == "ResEncUNet"


def test_a_file_that_is_there_is_refused_before_a_case_is_read(folder, tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(ConfigError, match="exists already; choose another file, or replace it by --force"):
        call("configure", folder, "-o", tmp_path / "mine.yaml")
    assert not (folder / ".volseg").exists()


def test_bad_cases_are_named_or_left_out_of_both(folder, tmp_path):
    file = folder / "imagesTr" / "synthetic_002.nii.gz"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"(?s)1 case\(s\) cannot be used.*synthetic_002.*--skip-bad"):
        call("configure", folder, "-o", tmp_path / "mine.yaml")
    assert "5, 1 channel(s)" in call("configure", folder, "-o", tmp_path / "mine.yaml", "--skip-bad").output
    assert load_config(tmp_path / "mine.yaml").data.skip_bad


def test_train_takes_a_folder_and_goes_on_as_it_was_planned(folder, tmp_path):
    run = tmp_path / "run"
    assert "| mean " in call("train", folder, "-o", run, *QUICK).output
    planned = (run / "planned.yaml").read_bytes()
    assert RunFolder(run).config().name == "task00_synthetic_unet"
    with pytest.raises(ConfigError, match="holds a run already; go on with it by --resume"):
        call("train", folder, "-o", run, *QUICK)
    # A case less would be planned otherwise; the run is held to its plan, and then to its cases.
    longer = [*QUICK, "--set", "training.epochs=2"]
    assert "| mean " in call("train", folder, "-o", run, *longer, "--resume").output
    assert (run / "planned.yaml").read_bytes() == planned
    assert "2 epochs" in call("train", folder, "-o", run, *longer, "--restart").output
    with pytest.raises(ConfigError, match=r"plans task00_synthetic_unet, not task00_synthetic_vnet; choose another fold"):
        call("train", folder, "-o", run, *longer, "--resume", "--preset", "vnet")


def test_restart_begins_where_nothing_was_begun(folder, tmp_path):
    assert "| mean " in call("train", folder, "-o", tmp_path / "run", *QUICK, "--restart").output


def test_a_run_of_a_config_does_not_go_on_by_its_data(folder, tmp_path):
    call("configure", folder, "-o", tmp_path / "mine.yaml")
    call("train", tmp_path / "mine.yaml", "-o", tmp_path / "run", *QUICK)
    with pytest.raises(ConfigError, match="was not begun from a data set; go on with it by the config"):
        call("train", folder, "-o", tmp_path / "run", "--resume")


def test_processes_of_a_launcher_do_not_plan_each_for_itself(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="run volseg configure .* first, and train with the config it writes"):
        call("train", folder, "-o", tmp_path / "run")


def test_presets_belong_to_data_sets(config_file):
    result = CliRunner().invoke(app, ["train", str(config_file), "--preset", "unet"])
    assert result.exit_code == 2
    assert "plan for a data set" in result.output


@pytest.mark.parametrize("preset", ["resenc", "vnet", "whole"])
def test_every_preset_trains(folder, tmp_path, preset):
    few = {"filters": [4, 8, 8, 8], "blocks": [1, 1, 1, 1]} if preset == "resenc" else {"filters": [4, 8, 8, 8]}
    quick = [part for part in QUICK if "filters" not in part]
    sets = [] if preset == "vnet" else [part for key in few.items() for part in ("--set", f"network.{key[0]}={key[1]}")]
    quick = [*("--set split.num_folds=3 --set device=cpu --set inference.mirror=false").split()]
    quick += [*"--set training.epochs=1 --set training.iterations=1 --set patch.batch=2".split()]
    assert "| mean " in call("train", folder, "--preset", preset, "-o", tmp_path / "run", *quick, *sets).output
