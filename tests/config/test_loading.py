"""Configs from files and the command line, frequent mistakes in them, and the messages for these."""

import re
from pathlib import Path

import pytest
import yaml

from volseg.config.loading import (
    differences,
    dump_config,
    load_config,
    override,
    path_override,
    require_sound_overrides,
)
from volseg.config.sections import LossConfig
from volseg.errors import ConfigError

MINIMAL = {
    "name": "a",
    "data": {"root": "x"},
    "patch": {"size": [8, 8, 8]},
    "network": {"name": "VNet", "dropout_prob": 0.1},
    "optimizer": {"name": "SGD", "lr": 0.1},
}


@pytest.fixture
def write(tmp_path):
    def written(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **changes}), encoding="utf-8")
        return path

    return written


def test_defaults_are_filled_and_the_resolved_config_reads_as_the_same(write, tmp_path):
    config = load_config(write())
    assert config.split.seed == 12345
    assert config.network.spec() == {"name": "VNet", "dropout_prob": 0.1}
    assert config.folder == Path("runs/a")
    assert load_config(dump_config(config, tmp_path / "run" / "config.yaml")) == config


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("training.epochs=5", ("training", "epochs"), 5),
        ("data.root=DIR/Task04", ("data", "root"), Path("DIR/Task04")),
        ("patch.size=[4, 5, 6]", ("patch", "size"), (4, 5, 6)),
        ("training.ema=null", ("training", "ema"), None),
        ("split.validation=none", ("split", "validation"), "none"),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
    ],
)
def test_overrides_are_read_as_yaml(write, assignment, path, value):
    section, key = path
    assert getattr(getattr(load_config(write(), [assignment]), section), key) == value


def test_an_override_reaches_into_a_list_and_a_component():
    values = {"losses": [{"name": "DiceLoss"}], "network": {"name": "UNet"}}
    assert override(values, "losses.0.weight=2")["losses"] == [{"name": "DiceLoss", "weight": 2}]
    assert override(values, "network.num_res_units=2")["network"] == {"name": "UNet", "num_res_units": 2}
    assert values["losses"] == [{"name": "DiceLoss"}]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("traning.epochs=3", "--set cannot be used:\n  traning: unknown key; did you mean 'training'?"),
        ("data.keep=gpu", "data.keep: Input should be 'auto', 'device' or 'memory', got 'gpu'"),
    ],
)
def test_an_override_that_no_config_takes_is_refused_before_there_is_one(assignment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_sound_overrides([assignment])


def test_an_override_that_some_config_takes_waits_for_it():
    overrides = ["losses.0.factor=2", "network.filters=[8, 16]", "split.fold=7", "patch.batch=2", "optimizer.lr=0.1"]
    assert require_sound_overrides(overrides)["losses"] == {"0": {"factor": 2}}


def test_all_faults_are_told_at_once(write):
    with pytest.raises(ConfigError, match=r"(?s)training\.epochs.*traning"):
        load_config(write(traning={}, training={"epochs": 0}))


def test_differences_name_the_keys(write):
    one = load_config(write())
    other = load_config(write(), ["training.epochs=5", "network.dropout_prob=0.2"])
    assert differences(one, other) == ["network.dropout_prob: 0.1 -> 0.2", "training.epochs: 100 -> 5"]


def test_a_located_config_reads_its_data_from_anywhere(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    located = load_config(write(), ["data.root=task", "split.file=../folds.json", "data.cache=~/c"]).located()
    assert (located.data.root, located.data.cache) == (tmp_path / "task", "/home/me/c")
    assert located.split.file == tmp_path.parent / "folds.json"
    assert located.located() == located


def test_a_losss_weight_is_a_list_of_class_weights_and_one_number_names_the_factor():
    loss = LossConfig.model_validate({"name": "DiceLoss", "weight": [1, 2], "factor": 0.5})
    assert (loss.factor, loss.spec()) == (0.5, {"name": "DiceLoss", "weight": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"a list of class weights; .* write factor: 0\.5"):
        LossConfig.model_validate({"name": "DiceLoss", "weight": 0.5})
    for wrong in ({"weight": 2, "factor": 1}, {"weight": [1, -1]}, {"weight": "2"}, {"weight": True}):
        with pytest.raises(ValueError, match="weight"):
            LossConfig.model_validate({"name": "DiceLoss", **wrong})


def test_a_path_of_another_encoding_is_told_as_such():
    """As Python hands over the bytes of an umlaut where the locale knows ASCII only."""
    with pytest.raises(ConfigError, match=r"output 'runs/.*' cannot be encoded in this locale; set LC_ALL"):
        path_override("output", Path(b"runs/\xc3\xbc".decode("ascii", "surrogateescape")))


CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

SETTINGS = [
    ("patch.bach=2", "patch.bach: unknown key; did you mean 'batch'?"),
    ("augmentation.rotation.degres=3", "augmentation.rotation.degres: unknown key; did you mean 'degrees'?"),
    ("network={dropout: 1}", "network.name: Field required"),
    ("network={namee: VNet}", "network.name: Field required; found 'namee', did you mean 'name'?"),
    ("parallel.split_size=2", "split_size belongs to strategy: pipeline"),
    ("name=../outside", "name: needed: letters, digits, '.', '_' and '-', starting with"),
    ("name.first=1", "'first' cannot be set in 'quickstart', which is not a section"),
    ("optimizer.lr=.nan", "optimizer: lr must be a finite number of 64 bits at most, got nan"),
    ("optimizer.lr=1e400", "optimizer: lr must be a finite number of 64 bits at most, got inf"),
    ("optimizer.betas=[0.9, .inf]", "optimizer: betas must be a finite number"),
    ("optimizer.options={a: [{b: -.inf}]}", "optimizer: options must be a finite number"),
    (f"network.channels=[{10**30}]", "network: channels must be a finite number of 64 bits at most, got 1000"),
    ("preprocessing=[{name: Spacing, spacing: [.nan, 1, 1]}]", "preprocessing.0: spacing must be a finite number"),
    ("losses=[{name: DiceLoss, factor: .inf}]", "factor: Input should be a finite number"),
    ("schedule.power=.nan", "schedule.power: Input should be a finite number"),
    ("training.clip=.inf", "training.clip: Input should be a finite number"),
    (f"training.epochs={10**12}", "training.epochs: Input should be less than 2147483648"),
    *((f"{key}=-1", f"{key}: Input should be greater than") for key in ("seed", "split.seed")),
    *((f"{key}=4294967296", f"{key}: Input should be less than") for key in ("seed", "split.seed")),
    ("metrics.0.name=MeanIoU", "metrics: needed: a list .* such as .*[{name: NAME}]"),
    ("preprocessing.5.name=ZScore", "'5' must be an index below 3"),
    ("trainin.epochs=2", "trainin: unknown key; did you mean 'training'?"),
    ("training.epoch=2", "training.epoch: unknown key; did you mean 'epochs'?"),
    ("training.epochs", "--set needs key=value, such as training.epochs=5, got 'training.epochs'"),
    ("training.epochs=-1", "training.epochs: Input should be greater than or equal to 1, got -1"),
    ("training.epochs=two", "training.epochs: Input should be a valid integer, .*, got 'two'"),
    ("training.clip=0,5", "training.clip: Input should be a valid number, .*, got '0,5'"),
    ("optimizer.lr=0,003", "optimizer: lr is the text '0,003'; write numbers as 0.003"),
    ("training.record=maybe", "training.record: needed: true or false, got 'maybe'"),
    ("training.precision=float16", "Input should be 'auto', 'fp32', 'bf16' or 'fp16', got 'float16'"),
    ("device=cuda:1", "device: Input should be 'auto', 'cpu' or 'cuda', got 'cuda:1'"),
    ("patch.size=40", "patch.size: needed: a list in brackets, such as [40, 40, 40] .*, got 40"),
    ("patch.size=[40,40]", "patch.size: needed: at least 3 values, got [40, 40]"),
    ("patch.size=[1,2,3,4]", "patch.size: A list should have at most 3 items .*, got [1, 2, 3, 4]"),
    ("patch.foreground=33", "patch.foreground: Input should be less than or equal to 1, got 33"),
    ("inference.overlap=50", "inference.overlap: Input should be less than 1, got 50"),
    ("network=UNet", "network: needed: a section of `key: value` lines (known keys: name, .*), got 'UNet'"),
    ("data=Task04", "data: needed: a section of `key: value` lines (known keys: cache, .*root, .*), got 'Task04'"),
    ("augmentation.rotate={}", "augmentation.rotate: unknown key; did you mean 'rotation'?"),
    ("augmentation.scaling.factor=[1.4, 0.7]", "factor must be (lowest, highest), got (1.4, 0.7)"),
    (
        "augmentation.elastic={spacing_voxels: 5, displacement_voxels: [0, 4]}",
        "displacement_voxels up to 4 folds the anatomy if control points are 5 voxels apart; set at most 2.015",
    ),
    ("preprocessing=ZScore", "preprocessing: needed: a list in brackets, such as .*[{name: NAME}], got 'ZScore'"),
    ("losses=[]", "losses: A list should have at least 1 item .*, got []"),
    ("metrics=[{name: MeanIoU}]", "metrics.0.output: Field required"),
    ("evaluation.tolerance=1mm", "evaluation.tolerance: Input should be a valid number, .*, got '1mm'"),
    ("name=a b", "name: needed: letters, digits, .* got 'a b'"),
    ("data.root=3", "data.root: needed: a path, in quotes if it is a number, got 3"),
    ("split.fold=7", "split: fold must be below num_folds=5, got 7"),
    ("training.epochs={a: [}", "the value is not valid YAML"),
]  # fmt: skip

FILES = {
    "empty": (b"", "needs `key: value` lines, got nothing; volseg configure FOLDER writes one"),
    "comment": (b"# later\n", "needs `key: value` lines, got nothing"),
    "list": (b"- a\n- b\n", "needs `key: value` lines, got a list"),
    "text": (b"just text\n", "needs `key: value` lines, got a str"),
    "tabs": (b"name: a\n\tdata: b\n", "is not valid YAML: .*line 2, column 1.*indent with spaces: YAML does not"),
    "twice": (b"name: a\nname: b\n", "the key 'name' occurs twice; keep one"),
    "image": (b"\x1f\x8b\x08\xff", "is not text in UTF-8 .*; name a YAML file saved as UTF-8"),
    "manifest": (b'{"name": "T", "labels": {"0": "a"}}', "is not a volseg .*: it has the keys labels, name; "),
}  # fmt: skip


def loosen(expected: str) -> str:
    """Return a pattern for a text in which only ``.*`` is special."""
    return ".*".join(map(re.escape, expected.split(".*")))


@pytest.mark.parametrize(("setting", "expected"), SETTINGS, ids=[setting for setting, _ in SETTINGS])
def test_a_wrong_setting_is_told(setting, expected):
    with pytest.raises(ConfigError) as told:
        load_config(CONFIG, ["data.root=x", setting])
    assert re.search(loosen(expected), str(told.value)), told.value
    assert "tuple" not in str(told.value).casefold()
    assert setting in str(told.value)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_told(tmp_path, name):
    content, expected = FILES[name]
    file = tmp_path / f"{name}.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert re.search(loosen(expected), str(told.value), flags=re.S), told.value
    assert str(file) in str(told.value)


def test_a_file_that_is_not_there_is_told_with_the_nearest_and_with_our_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_task.yaml").touch()
    with pytest.raises(ConfigError, match=r"my_taks.yaml cannot be read: No such .*; did you mean 'my_task"):
        load_config("my_taks.yaml")
    with pytest.raises(ConfigError, match="comes with volseg: did you mean 'task04_cpu'"):
        load_config("configs/task04_cpu.yaml")


def test_a_folder_is_told_and_a_run_by_its_config(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory; name a YAML file"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"it is a run folder; its config is {tmp_path / 'config.yaml'}"):
        load_config(tmp_path)
