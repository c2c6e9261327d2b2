"""From a folder of cases to a trained network, without a config or with one that was planned."""

import json
import shutil

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from volseg.cli import app
from volseg.commands import spell
from volseg.errors import ConfigError, DataError
from volseg.experiment import RunFolder, load_config

SHORT = [
    "training.epochs=1",
    "training.iterations=1",
    "inference.mirror=false",
    "inference.overlap=0",
    "split.num_folds=3",
    "device=cpu",
]


def setting(*assignments):
    return [part for assignment in (*SHORT, *assignments) for part in ("--set", assignment)]


QUICK = setting("network.filters=[4, 8, 8]")


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return the folder of four cases of 16 x 16 x 16 voxels or so, the smallest of which a U-Net is planned."""
    root = tmp_path_factory.mktemp("data") / "Task00_Tiny"
    rng = np.random.default_rng(0)
    for kind in ("imagesTr", "labelsTr"):
        (root / kind).mkdir(parents=True)
    names = [f"tiny_{number}.nii.gz" for number in range(4)]
    for name in names:
        label = np.zeros((16, 16, 15), np.uint8)
        label[4:12, 4:8, 4:12] = 1
        label[4:12, 8:12, 4:12] = 2
        image = (label * 50 + rng.normal(100, 10, label.shape)).astype(np.float32)
        for kind, voxels in (("imagesTr", image), ("labelsTr", label)):
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), root / kind / name)
    manifest = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "front", "2": "back"},
        "training": [{"image": f"imagesTr/{name}", "label": f"labelsTr/{name}"} for name in names],
    }
    (root / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    return root


@pytest.fixture
def folder(tiny, tmp_path):
    """Return a copy of the task, whose folder may be written to."""
    return shutil.copytree(tiny, tmp_path / tiny.name)


def test_configure_then_train(folder, tmp_path):
    file = tmp_path / "mine.yaml"
    said = call("configure", folder, "-o", file, "--gpu-memory", "6GiB", "--name", "mine").output
    assert "4, 1 channel(s), 3 labels" in said
    assert f"volseg train {file}" in said
    config = load_config(file)
    assert (config.name, config.data.root) == ("mine", folder)
    assert (folder / ".volseg" / "fingerprint.json").is_file()
    result = call("train", file, "-o", tmp_path / "run", *QUICK)
    assert "| mean " in result.output
    network = json.loads((tmp_path / "run" / "network.json").read_text(encoding="utf-8"))
    assert str(config.network.spec()["strides"]) in str(network)
    with pytest.raises(ConfigError, match="was not planned from a data set; continue it with the config"):
        call("train", folder, "-o", tmp_path / "run", "--resume")


def test_the_second_plan_reads_no_case(folder, tmp_path):
    call("configure", folder, "-o", tmp_path / "one.yaml")
    for image in (folder / "imagesTr").iterdir():
        image.chmod(0o644)  # what changes no content is no change
    before = (folder / ".volseg" / "fingerprint.json").stat().st_mtime_ns
    call("configure", folder, "-o", tmp_path / "two.yaml", "--preset", "resenc")
    assert (folder / ".volseg" / "fingerprint.json").stat().st_mtime_ns == before
    assert load_config(tmp_path / "two.yaml").network.name == "ResEncUNet"


def test_a_file_that_is_there_is_refused_before_a_case_is_read(folder, tmp_path):
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists; choose another path, or use --overwrite to replace it"):
        call("configure", folder, "-o", tmp_path / "mine.yaml")
    assert not (folder / ".volseg").exists()


def test_bad_cases_are_named_or_left_out_of_both(folder, tmp_path):
    file = folder / "imagesTr" / "tiny_2.nii.gz"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"(?s)1 case\(s\) cannot be used.*tiny_2.*--skip-bad"):
        call("configure", folder, "-o", tmp_path / "mine.yaml")
    assert "3, 1 channel(s)" in call("configure", folder, "-o", tmp_path / "mine.yaml", "--skip-bad").output
    assert load_config(tmp_path / "mine.yaml").data.skip_bad


def test_train_takes_a_folder_and_goes_on_as_it_was_planned(folder, tmp_path):
    run = tmp_path / "run"
    assert "| mean " in call("train", folder, "-o", run, *QUICK, "--restart").output  # begins, as nothing was begun
    planned = (run / "planned.yaml").read_bytes()
    assert RunFolder(run).config().name == "task00_tiny_unet"
    with pytest.raises(ConfigError, match="holds a run already; continue it with --resume"):
        call("train", folder, "-o", run, *QUICK)
    longer = setting("network.filters=[4, 8, 8]", "training.epochs=2")
    assert "| mean " in call("train", folder, "-o", run, *longer, "--resume").output
    assert (run / "planned.yaml").read_bytes() == planned
    assert "epochs 2;" in call("train", folder, "-o", run, *longer, "--restart").output
    with pytest.raises(ConfigError, match=r"plans task00_tiny_unet, not task00_tiny_vnet; choose another folder"):
        call("train", folder, "-o", run, *longer, "--resume", "--preset", "vnet")


def test_an_override_that_no_config_takes_costs_no_reading(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"training\.epoch: unknown key; did you mean 'epochs'\?"):
        call("train", folder, "-o", tmp_path / "run", "--set", "training.epoch=3")
    assert not (folder / ".volseg").exists()
    assert not (tmp_path / "run").exists()


def test_processes_of_a_launcher_do_not_plan_each_for_itself(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match=r"run volseg configure .* first, and train with the config it writes"):
        call("train", folder, "-o", tmp_path / "run")


def test_presets_belong_to_data_sets(config_file):
    result = CliRunner().invoke(app, ["train", str(config_file), "--preset", "unet"])
    assert result.exit_code == 2
    assert "plan for a data set" in result.output


@pytest.mark.parametrize(
    ("preset", "small"),
    [
        ("resenc", ["network.filters=[4, 8, 8]", "network.blocks=[1, 1, 1]"]),
        pytest.param("vnet", [], marks=pytest.mark.slow),  # 45 million parameters
        ("whole", ["network.filters=[4, 8, 8]"]),
    ],
)
def test_every_preset_trains(folder, tmp_path, preset, small):
    result = call("train", folder, "--preset", preset, "-o", tmp_path / "run", *setting("patch.batch=1", *small))
    assert "| mean " in result.output


def test_what_is_to_be_run_next_can_be_copied(tiny, tmp_path):
    """A name may hold spaces."""
    told = call("configure", tiny, "-o", tmp_path / "my plan.yaml")
    line = spell(f"volseg train '{tmp_path}/my plan.yaml'")
    assert f"  {line}" in told.output.splitlines()
