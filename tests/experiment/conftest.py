"""A small synthetic task, and a config that trains on it in seconds."""

import pytest
import yaml

from volseg.data.synthetic import make_task
from volseg.experiment import load_config

CONFIG = {
    "name": "tiny",
    "preprocessing": [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.5, 1.5, 1.5]}, {"name": "ZScore"}],
    "split": {"num_folds": 3},
    "patch": {"size": [16, 16, 16], "batch": 2, "foreground": 0.5},
    "network": {"name": "UNet", "channels": [4, 8], "strides": [2], "num_res_units": 1},
    "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
    "training": {"epochs": 2, "iterations": 3, "validate_every": 1, "ema": 0.9},
}


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Return the folder of six cases with labels and one without."""
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=6, num_test=1)


@pytest.fixture
def config_file(task, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump({**CONFIG, "data": {"root": str(task)}, "output": str(tmp_path / "run")}), encoding="utf-8"
    )
    return path


@pytest.fixture
def configured(config_file):
    """Return the config with some values overridden."""
    return lambda *overrides: load_config(config_file, overrides)
