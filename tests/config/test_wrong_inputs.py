"""What people write wrong into a config or on the command line, and what they are told: needed, came, how to fix."""

import re
from pathlib import Path

import pytest

from volseg.config.loading import load_config
from volseg.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

SETTINGS = [
    ("losses.0.weight=2", "losses: needed: a list in brackets, of which --set could change item 0; .* has none"),
    ("metrics.0.name=MeanIoU", "metrics: needed: a list .* such as metrics: [{name: NAME}]"),
    ("preprocessing.5.name=ZScore", "'5' must be an index below 3"),
    ("trainin.epochs=2", "trainin: unknown key; did you mean 'training'?"),
    ("training.epoch=2", "training.epoch: unknown key; did you mean 'epochs'?"),
    ("training.epochs", "--set takes key=value such as training.epochs=5, got 'training.epochs'"),
    ("training.epochs=-1", "training.epochs: Input should be greater than or equal to 1, got -1"),
    ("training.epochs=two", "training.epochs: needed: a whole number, got 'two'"),
    ("training.epochs=1.5", "training.epochs: needed: a whole number, got 1.5"),
    ("training.epochs=null", "training.epochs: needed: a whole number, got None"),
    ("training.clip=0,5", "training.clip: needed: a number; write 0.5, with a point, got '0,5'"),
    ("optimizer.lr=1e-3,5", "lr is a text; write a number with a point, or a list: [1e-3,5], got '1e-3,5'"),
    ("optimizer.lr=0,003", "optimizer: lr is a text; write 0.003, with a point, got '0,003'"),
    ("training.record=maybe", "training.record: needed: true or false, got 'maybe'"),
    ("training.precision=float16", "Input should be 'auto', 'fp32', 'bf16' or 'fp16', got 'float16'"),
    ("training=null", "training: needed: a section .*; leave the key out for its defaults"),
    ("device=cuda:1", "device: Input should be 'auto', 'cpu' or 'cuda', got 'cuda:1'"),
    ("patch.size=40", "patch.size: needed: a list in brackets, such as [40, 40, 40], got 40"),
    ("patch.size=40,40,40", "patch.size: needed: a list in brackets, such as [40,40,40], got '40,40,40'"),
    ("patch.size=[40,40]", "patch.size: needed: at least 3 values, got [40, 40]"),
    ("patch.size=[1,2,3,4]", "patch.size: needed: at most 3 item(s) in the list, got [1, 2, 3, 4]"),
    ("patch.foreground=33", "patch.foreground: Input should be less than or equal to 1, got 33"),
    ("inference.overlap=50", "inference.overlap: Input should be less than 1, got 50"),
    ("network=UNet", "network: needed: a section of `key: value` lines, such as network: {name: UNet}, got 'UNet'"),
    ("schedule=cosine", "such as schedule: {name: cosine}, got 'cosine'"),
    ("split=none", "split: needed: a section of `key: value` lines with keys of file, fold, .*validation"),
    ("data=Task04", "data: needed: a section of `key: value` lines with keys of cache, .*root, .*got 'Task04'"),
    ("augmentation.elastic=0.5", "augmentation.elastic: needed: a section .* keys of .*probability"),
    ("augmentation.rotate={}", "augmentation.rotate: unknown key; did you mean 'rotation'?"),
    ("augmentation.scaling.factor=[1.4, 0.7]", "factor must be (lowest, highest), got (1.4, 0.7)"),
    (
        "augmentation.elastic={spacing_voxels: 5, displacement_voxels: [0, 4]}",
        "displacement_voxels of up to 4 folds the anatomy where control points are 5 voxels apart",
    ),
    ("preprocessing=ZScore", "preprocessing: needed: a list in brackets, such as preprocessing: [{name: ZScore}]"),
    ("losses=DiceLoss", "losses: needed: a list in brackets, such as losses: [{name: DiceLoss}], got 'DiceLoss'"),
    ("losses={name: DiceLoss}", "losses: needed: a list in brackets, such as losses: [{name: DiceLoss}]"),
    ("losses=[DiceLoss]", "losses.0: needed: a section .*, such as losses: {name: DiceLoss}, got 'DiceLoss'"),
    ("losses=[]", "losses: needed: at least 1 item(s) in the list, got []"),
    ("metrics=[{name: MeanIoU}]", "metrics.0.output: Field required"),
    ("evaluation.tolerance=1mm", "evaluation.tolerance: needed: a number, got '1mm'"),
    ("name=a b", "name: needed: letters, digits, .* got 'a b'"),
    ("data.root=3", "data.root: needed: a path, got 3"),
    ("split.fold=7", "split: fold must be below num_folds=5, got 7"),
    ("training.epochs={a: [}", "the value is not valid YAML"),
]  # fmt: skip

FILES = {
    "empty": (b"", "must hold `key: value` lines, got nothing; volseg configure FOLDER writes one"),
    "comment": (b"# later\n", "must hold `key: value` lines, got nothing"),
    "list": (b"- a\n- b\n", "must hold `key: value` lines, got a list"),
    "text": (b"just text\n", "must hold `key: value` lines, got a str"),
    "tabs": (b"name: a\n\tdata: b\n", "is not valid YAML: .*line 2, column 1.*indent by spaces: YAML takes no tabs"),
    "twice": (b"name: a\nname: b\n", "the key 'name' stands twice; keep one"),
    "image": (b"\x1f\x8b\x08\xff", "is no text in UTF-8 .*; name a YAML file, saved as UTF-8"),
    "manifest": (b'{"name": "T", "labels": {"0": "a"}}', "is no config .*: it has labels, name.*data set by its"),
}  # fmt: skip


def loosen(expected: str) -> str:
    """Return a pattern for words in which ``.*`` alone is one."""
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
    with pytest.raises(ConfigError, match=f"own of that name is {CONFIG.with_name('task04_cpu.yaml')}"):
        load_config("configs/task04_cpu.yaml")


def test_a_folder_is_told_and_a_run_by_its_config(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder; name a YAML file"):
        load_config(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"it is the folder of a run, whose config is {tmp_path / 'config.yaml'}"):
        load_config(tmp_path)
