"""From a folder of cases to a trained network, without a config, with a planned one, or from `init`."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import nibabel
import numpy as np
import pytest
from config_keys import list_config_keys
from typer.testing import CliRunner

from volseg.cli import app
from volseg.commands import spell
from volseg.config.catalogue import list_shipped
from volseg.config.describing import SCHEMA_FILE, write_commented
from volseg.config.schema import ExperimentConfig
from volseg.config.yaml_values import parse_yaml
from volseg.data.layouts import load_task
from volseg.errors import ConfigError, DataError
from volseg.experiment import RunFolder, load_config
from volseg.experiment.configuring import PLAIN, init_config
from volseg.planning.fingerprint import fingerprint_path

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
    """Return the folder of four cases of about 16^3 voxels, the smallest that a U-Net is planned for."""
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
    """Return a copy of the task in a writable folder."""
    return shutil.copytree(tiny, tmp_path / tiny.name)


def test_configure_then_train(folder, tmp_path):
    file = tmp_path / "my plan.yaml"  # the command to type next quotes the space
    file.touch()
    with pytest.raises(ConfigError, match="exists; choose another path, or use --overwrite to replace it"):
        call("configure", folder, "-o", file)
    place = fingerprint_path(load_task(folder))
    assert not place.exists(), "no case is read"
    file.unlink()
    said = call("configure", folder, "-o", file, "--gpu-memory", "6GiB", "--name", "mine").output
    assert "4, 1 channel(s), 3 labels" in said
    assert "  " + spell(f"volseg train '{file}'") in said.splitlines()
    config = load_config(file)
    assert (config.name, config.data.root) == ("mine", folder)
    before = place.stat().st_mtime_ns
    call("configure", folder, "-o", tmp_path / "second.yaml", "--preset", "resenc")
    assert place.stat().st_mtime_ns == before, "the second plan reads no case"
    assert load_config(tmp_path / "second.yaml").network.name == "ResEncUNet"
    result = call("train", file, "-o", tmp_path / "run", *QUICK)
    assert "| mean " in result.output
    network = json.loads((tmp_path / "run" / "network.json").read_text(encoding="utf-8"))
    assert str(config.network.spec()["strides"]) in str(network)
    with pytest.raises(ConfigError, match="not planned from a data set; continue it with the config it started with"):
        call("train", folder, "-o", tmp_path / "run", "--resume")


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
    with pytest.raises(ConfigError, match="already contains a run; continue it with volseg train --resume"):
        call("train", folder, "-o", run, *QUICK)
    longer = setting("network.filters=[4, 8, 8]", "training.epochs=2")
    assert "| mean " in call("train", folder, "-o", run, *longer, "--resume").output
    assert (run / "planned.yaml").read_bytes() == planned
    assert "epochs 2;" in call("train", folder, "-o", run, *longer, "--restart").output
    with pytest.raises(ConfigError, match=r"plans task00_tiny_unet, not task00_tiny_vnet; choose another --output"):
        call("train", folder, "-o", run, *longer, "--resume", "--preset", "vnet")


def test_an_override_that_no_config_takes_costs_no_reading(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"training\.epoch: unknown key; did you mean 'epochs'\?"):
        call("train", folder, "-o", tmp_path / "run", "--set", "training.epoch=3")
    assert not fingerprint_path(load_task(folder)).exists()
    assert not (tmp_path / "run").exists()


def test_processes_of_a_launcher_do_not_plan_each_for_itself(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match=r"run volseg configure .* first, and train with that config"):
        call("train", folder, "-o", tmp_path / "run")


def test_presets_belong_to_data_sets(config_file):
    result = CliRunner().invoke(app, ["train", str(config_file), "--preset", "unet"])
    assert result.exit_code == 2
    assert "need a data set" in result.output


@pytest.mark.parametrize(
    ("preset", "small"),
    [
        # resenc: see test_thick_slices.py
        pytest.param("vnet", [], marks=pytest.mark.slow),  # 45 million parameters
        ("whole", ["network.filters=[4, 8, 8]"]),
    ],
)
def test_every_preset_trains(folder, tmp_path, preset, small):
    result = call("train", folder, "--preset", preset, "-o", tmp_path / "run", *setting("patch.batch=1", *small))
    assert "| mean " in result.output


def test_it_reads_back_as_the_defaults_and_obeys_the_schema_that_it_names(tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml") == ExperimentConfig.model_validate(PLAIN)
    init_config(tmp_path / "b.yaml", minimal=True)
    whole, short = (parse_yaml((tmp_path / name).read_text(encoding="utf-8"), name) for name in ("a.yaml", "b.yaml"))
    assert short == {**PLAIN, "patch": {"size": [96, 96, 96]}}
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, of the extra dev")
    jsonschema.validate(whole, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def test_every_value_has_its_meaning_above_it(tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml")
    lines = (tmp_path / "a.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# yaml-language-server: $schema=file://")
    depth: list[str] = []
    keys = []
    for above, line in pairwise(lines):
        text = line.strip()
        if not text or text.startswith(("#", "- ")):
            continue
        key, _, value = text.partition(":")
        depth = [*depth[: (len(line) - len(line.lstrip())) // 2], key]
        assert above.strip().startswith("# "), line
        if value:
            keys.append(".".join(depth))
    on_one_line = ("network", "optimizer", "schedule")  # a component and its parameters
    on_several = {"preprocessing", "losses", "logging.loggers"}  # lists of them
    expected = {key for key in list_config_keys() if key.partition(".")[0] not in on_one_line}
    assert {*keys} == {*expected, *on_one_line} - on_several
    text = "\n".join(lines)
    assert "# Precision of activations and gradients; auto uses bf16" in text
    assert max(map(len, lines[1:])) <= 120


@pytest.mark.parametrize("name", list_shipped())
@pytest.mark.parametrize("minimal", [False, True])
def test_a_shipped_config_is_written_with_comments_and_stays_the_same(name: str, minimal: bool, tmp_path: Path) -> None:
    init_config(tmp_path / "a.yaml", like=name, minimal=minimal)
    assert load_config(tmp_path / "a.yaml") == load_config(name) == load_config(list_shipped()[name])


def test_values_that_yaml_takes_for_others_stay_text(tmp_path: Path) -> None:
    values = {
        **PLAIN,
        "name": "null",
        "data": {"root": "2024-05-01 Größe: #1", "cache": "none"},
        "losses": [{"name": "yes", "note": "a, {b}", "number": 1e-5, "nested": {"on": [None, True, "1e3"]}}],
        "evaluation": {"tolerance": {"no": 1.0, "Left lung": 2.0}},
    }
    config = ExperimentConfig.model_validate(values)
    write_commented(config, tmp_path / "a.yaml")
    assert load_config(tmp_path / "a.yaml") == config


def test_the_verb_writes_and_says_what_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data").mkdir()
    told = CliRunner().invoke(app, ["init", "--data", "my data", "--minimal"], catch_exceptions=False)
    assert told.exit_code == 0
    assert "train experiment.yaml" in told.output
    assert "set data.root" not in told.output
    assert load_config("experiment.yaml").data.root == Path("my data")
    with pytest.raises(ConfigError, match="exists; choose"):
        CliRunner().invoke(app, ["init"], catch_exceptions=False)
    told = CliRunner().invoke(app, ["init", "--overwrite"], catch_exceptions=False)
    assert "set data.root" in told.output
    with pytest.raises(ConfigError, match="did you mean 'task04_unet'"):
        init_config(tmp_path / "a.yaml", like="task04_unett")
    assert not (tmp_path / "a.yaml").exists()
