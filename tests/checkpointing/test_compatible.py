"""The table of values that may differ on resume is complete and matches a training's behaviour."""

import pytest

from volseg.checkpointing.compatible import RULES, list_keys, may_differ, require_same_config
from volseg.checkpointing.folder import RunFolder
from volseg.config.loading import dump_config
from volseg.errors import ConfigError

FREE = {
    *("output", "device", "training.kernels", "training.checkpoint_minutes", "training.spot"),
    *("data.root", "data.keep", "data.device_limit", "data.cache", "data.cache_limit", "split.file", "split.group"),
    *("inference.window", "inference.batch"),
}
"""Keys outside of the sections ``parallel`` and ``logging``, and besides the length of a training."""


def leaves(model, prefix=""):
    """Return the dotted keys of a config, with their values."""
    for name in type(model).model_fields:
        value, key = getattr(model, name), f"{prefix}{name}"
        yield from leaves(value, f"{key}.") if hasattr(type(value), "model_fields") else [(key, value)]


def test_every_key_of_the_config_may_differ_or_must_be_equal(configured):
    """A key that is added to the config must be equal, until somebody writes down why it may differ."""
    keys = {key for key, _ in leaves(configured())}
    expected = FREE | {key for key in keys if key.startswith(("parallel.", "logging."))}
    assert {key for key in keys if may_differ(key, folds=True)} == expected
    assert {key for key in keys if may_differ(key)} == expected | {"training.epochs", "training.patience"}
    assert not any(map(may_differ, ("parallel_data", "training.kernels_of", "outputs")))  # sections are no prefixes


def test_every_key_of_the_table_is_one_of_the_config(configured):
    keys = {key for key, _ in leaves(configured())}
    named = {name for what in RULES for name in list_keys(what)}
    unknown = {name for name in named if name not in keys and not any(key.startswith(name) for key in keys)}
    assert not unknown
    assert {name for name in named if name.endswith(".")} == {"parallel.", "logging."}


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("seed=1", "seed: 12345 -> 1"),
        ("split.seed=7", r"split\.seed: 12345 -> 7"),
        ("patch.batch=4", r"patch\.batch: 2 -> 4"),
        ("network.num_res_units=2", r"network\.num_res_units: 1 -> 2"),
        ("training.precision=bf16", r"training\.precision: auto -> bf16"),
        ("training.kernels=torch", None),
        ("parallel.data=2", None),
        ("logging.loggers=[tensorboard]", None),
        ("training.epochs=9", None),
    ],
)
def test_what_differs_is_refused_or_taken(configured, override, refused):
    before = configured()
    dump_config(before.located(), before.folder / "config.yaml")
    after = configured(override)
    if refused is None:
        require_same_config(RunFolder(before.folder), after)
    else:
        with pytest.raises(ConfigError, match=rf"run was started with another config: {refused}\. Restore"):
            require_same_config(RunFolder(before.folder), after)


def test_a_fold_is_not_made_longer(configured):
    before = configured()
    dump_config(before.located(), before.folder / "config.yaml")
    with pytest.raises(ConfigError, match=r"training\.epochs: 2 -> 3\. .* start a new cross-validation"):
        require_same_config(RunFolder(before.folder), configured("training.epochs=3"), folds=True)
