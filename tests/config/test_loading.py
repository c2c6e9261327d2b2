import itertools
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
from volseg.config.schema import LossConfig
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
        ("training.epoch=3", "training.epoch: unknown key; did you mean 'epochs'?"),
        ("training.epochs=0", "training.epochs: Input should be greater than or equal to 1, got 0"),
        ("training.epochs", "--set takes key=value"),
        ("patch.size=[8, 8, 8", "the value"),
        ("data.keep=gpu", "data.keep: Input should be 'auto', 'device' or 'memory', got 'gpu'"),
    ],
)
def test_an_override_that_no_config_takes_is_refused_before_there_is_one(assignment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_sound_overrides([assignment])


def test_an_override_that_some_config_takes_waits_for_it():
    overrides = ["losses.0.factor=2", "network.filters=[8, 16]", "split.fold=7", "patch.batch=2", "optimizer.lr=0.1"]
    assert require_sound_overrides(overrides)["losses"] == {"0": {"factor": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": {"size": [8, 8, 8], "bach": 2}}, "patch.bach: unknown key; did you mean 'batch'?"),
        (
            {"augmentation": {"rotation": {"degres": 3}}},
            "augmentation.rotation.degres: unknown key; did you mean 'degrees'?",
        ),
        ({"network": {"dropout": 1}}, "network.name: Field required"),
        ({"network": {"namee": "VNet"}}, "network.name: Field required; 'namee' is there, did you mean 'name'?"),
        ({"parallel": {"split_size": 2}}, "split_size belongs to strategy: pipeline"),
        ({"name": "../outside"}, "name: needed: letters, digits, '.', '_' and '-', the first"),
    ],
)
def test_a_fault_is_one_sentence_with_key_value_and_remedy(write, changes, message):
    with pytest.raises(ConfigError) as raised:
        load_config(write(**changes))
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{write(**changes)} cannot be used:")


def test_a_fault_of_an_override_is_told_with_it(write):
    with pytest.raises(ConfigError, match=r"yaml with --set inference.miror=true cannot be used:\n  inference.miror: "):
        load_config(write(), ["inference.miror=true"])


def test_all_faults_are_told_at_once(write):
    with pytest.raises(ConfigError, match=r"(?s)training\.epochs.*traning"):
        load_config(write(traning={}, training={"epochs": 0}))


def test_differences_name_the_keys(write):
    one = load_config(write())
    other = load_config(write(), ["training.epochs=5", "network.dropout_prob=0.2"])
    assert differences(one, other) == ["network.dropout_prob: 0.1 -> 0.2", "training.epochs: 100 -> 5"]


def test_a_located_config_reads_its_data_from_anywhere(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    located = load_config(write(), ["data.root=task", "split.file=../folds.json"]).located()
    assert located.data.root == tmp_path / "task"
    assert located.split.file == tmp_path.parent / "folds.json"
    assert located.located() == located


@pytest.mark.parametrize("section", [{"capture": False}, {"capture": False, "record": True}])
def test_a_key_of_before_is_unknown_and_names_the_one_of_now(write, section):
    with pytest.raises(ConfigError, match=r"training\.capture: unknown key; write training\.record"):
        load_config(write(training=section))
    with pytest.raises(ConfigError, match=r"training\.capture: unknown key; write training\.record"):
        load_config(write(), ["training.capture=false"])


SEEDS = list(itertools.product(["seed", "split.seed"], ["-1", "4294967296"]))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.lr=.nan", "optimizer: lr must be a finite number of 64 bits at most, got nan"),
        ("optimizer.lr=1e400", "optimizer: lr must be a finite number of 64 bits at most, got inf"),
        ("optimizer.betas=[0.9, .inf]", "optimizer: betas must be a finite number"),
        ("optimizer.options={a: [{b: -.inf}]}", "optimizer: options must be a finite number"),
        (f"network.channels=[{10**30}]", "network: channels must be a finite number of 64 bits at most, got 1000"),
        (
            "preprocessing=[{name: Spacing, spacing: [.nan, 1, 1]}]",
            r"preprocessing\.0: spacing must be a finite number",
        ),
        ("losses=[{name: DiceLoss, factor: .inf}]", "factor: Input should be a finite number"),
        ("schedule.power=.nan", r"schedule\.power: Input should be a finite number"),
        ("training.clip=.inf", r"training\.clip: Input should be a finite number"),
        (f"training.epochs={10**12}", r"training\.epochs: Input should be less than 2147483648"),
        *((f"{key}={value}", f"{key}: Input should be (greater|less) than") for key, value in SEEDS),
        ("name.first=1", "'first' lies inside the plain value 'a'"),
    ],
)
def test_an_override_that_nobody_can_mean_is_refused_when_the_config_is_read(write, assignment, message):
    """Numbers that are none, seeds that do not suit every generator, and keys that lead nowhere."""
    with pytest.raises(ConfigError, match=message):
        load_config(write(losses=[{"name": "DiceLoss"}]), [assignment])


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
    with pytest.raises(ConfigError, match=r"output 'runs/.*' is no text in the encoding of this locale; set LC_ALL"):
        path_override("output", Path(b"runs/\xc3\xbc".decode("ascii", "surrogateescape")))
