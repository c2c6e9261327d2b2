"""A small synthetic task, and a config that trains on it in seconds."""

import shutil

import pytest
import yaml

from volseg.checkpointing.file import load_checkpoint
from volseg.config.loading import dump_config
from volseg.data.synthetic import make_task
from volseg.experiment import RunFolder, cross_validate, load_config, train

CONFIG = {
    "name": "tiny",
    "preprocessing": [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.5, 1.5, 1.5]}, {"name": "ZScore"}],
    "split": {"num_folds": 3},
    "patch": {"size": [16, 16, 16], "batch": 2, "foreground": 0.5},
    "network": {"name": "UNet", "channels": [4, 8], "strides": [2], "num_res_units": 1},
    "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
    "training": {"epochs": 2, "iterations": 3, "validate_every": 1, "ema": 0.9},
    "logging": {"loggers": []},  # TensorBoard takes a third of such a training
}


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Return the folder of six cases with labels and one without."""
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=6, num_test=1)


def write_config(task, folder):
    """Write the config of runs in ``folder``."""
    path = folder / "tiny.yaml"
    path.write_text(
        yaml.safe_dump({**CONFIG, "data": {"root": str(task)}, "output": str(folder / "run")}), encoding="utf-8"
    )
    return path


def latest(folder):
    """Return the newest checkpoint of a run folder."""
    return load_checkpoint(folder / "checkpoints" / "latest.pt")


@pytest.fixture
def config_file(task, tmp_path):
    return write_config(task, tmp_path)


@pytest.fixture(scope="session")
def trained(task, tmp_path_factory):
    """Return the outcome of a training by `CONFIG`, whose folder nobody may change: whoever does trains his own."""
    folder = tmp_path_factory.mktemp("trained")
    outcome = train(load_config(write_config(task, folder)))
    before = _list_written(outcome.folder.path)
    yield outcome
    assert _list_written(outcome.folder.path) == before, "a test has changed what all share"


def _list_written(folder):
    """Return the files and when they were written, but for what is kept between two uses."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def cross_validated(task, tmp_path_factory):
    """Return the folder of a cross-validation of three folds, which nobody may change: copy it."""
    config = load_config(write_config(task, tmp_path_factory.mktemp("cross_validated")))
    short = config.training.model_copy(update={"epochs": 1, "iterations": 1})
    cross_validate(config.model_copy(update={"training": short}))
    return config.folder


@pytest.fixture(scope="session")
def cpu_run(cross_validated, tmp_path_factory):
    """Return a trained run that runs on the CPU, which nobody may change."""
    run = RunFolder(shutil.copytree(cross_validated / "fold_0", tmp_path_factory.mktemp("cpu") / "run"))
    dump_config(run.config(["device=cpu"]), run.config_file)
    return run


@pytest.fixture
def own_run(cpu_run, tmp_path):
    """Return a copy of a trained run that runs on the CPU, which a test may change."""
    return RunFolder(shutil.copytree(cpu_run.path, tmp_path / "own_run"))


@pytest.fixture
def configured(config_file):
    """Return the config with some values overridden."""
    return lambda *overrides: load_config(config_file, overrides)
