"""An experiment on several devices is the experiment on one: same losses, same weights, same Dice."""

import json
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from tests.experiment.checkpoints import latest
from volseg.checkpointing.folder import RunFolder
from volseg.errors import ConfigError
from volseg.experiment import load_config, predict, train, train_on, validate

pytestmark = pytest.mark.usefixtures("ready_python")

# float32: sums over shards add up in another order, and six optimizer steps carry that on.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}


def assert_same_run(one, other):
    for mine, theirs in zip(one.history, other.history, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, **TOLERANCE)
    torch.testing.assert_close(one.model, other.model, **TOLERANCE)
    # Dice counts voxels: a handful of ties may fall to the other side.
    assert one.history[-1].score == pytest.approx(other.history[-1].score, abs=2e-3)


@pytest.fixture
def plain(trained):
    return latest(trained.folder.path)


@pytest.fixture(scope="module")
def expected(trained, task, tmp_path_factory):
    """Return the label that the plain run predicts."""
    (path,) = predict(trained.folder, [task / "imagesTs"], tmp_path_factory.mktemp("expected")).label_maps.values()
    return np.asarray(nibabel.load(path).dataobj)


@pytest.mark.parametrize(
    "parallel",
    [
        "{strategy: spatial, devices: 1, checkpoint: all}",
        "{strategy: spatial, devices: 2}",
        "{strategy: pipeline, split_size: 1, devices: 2}",
    ],
    ids=["spatial, recomputed on one device", "spatial", "pipeline"],
)
def test_devices_of_one_process(parallel, plain, expected, configured, task, tmp_path):
    outcome = train(configured(f"parallel={parallel}"))
    assert_same_run(latest(outcome.folder.path), plain)
    (written,) = predict(outcome.folder, [task / "imagesTs"], tmp_path / "out").label_maps.values()
    assert (np.asarray(nibabel.load(written).dataobj) != expected).mean() < 1e-3


DEALT = "2 replicas of the network, each step's batch of 2 dealt 1 + 1"
CUT = "each step's batch of 2, every volume cut into 2 slabs"


@pytest.mark.parametrize(
    ("num_gpus", "mesh", "says"),
    [
        pytest.param(2, [], DEALT, id="dealt"),
        pytest.param(2, ["parallel.spatial=2"], CUT, id="cut"),
        pytest.param(None, ["parallel.data=2"], DEALT, id="started by the config"),
        # As by torchrun below, and what the name stands for is found where configs are read (config/test_parallel.py).
        pytest.param(2, ["parallel.strategy=spatial"], CUT, id="cut by the strategy", marks=pytest.mark.slow),
    ],
)
def test_processes_started_by_gpus(num_gpus, mesh, says, plain, config_file, tmp_path, capfd):
    mesh = ["device=cpu", *mesh]
    train_on(num_gpus, config_file, mesh)
    told = capfd.readouterr().err
    assert told.count(says) == 1  # by process 0
    assert_same_run(latest(tmp_path / "run"), plain)
    summary = json.loads((tmp_path / "run" / "validation" / "summary.json").read_text(encoding="utf-8"))
    assert all(Path(case["prediction_file"]).exists() for case in summary["metric_per_case"])
    # Where it ran is not part of what was trained, and a single process validates and predicts.
    again = load_config(config_file, mesh).located()
    assert load_config(tmp_path / "run" / "config.yaml") == again
    validated = validate(RunFolder(tmp_path / "run"), overwrite=True)
    assert validated.summary["foreground_mean"]["Dice"] == pytest.approx(summary["foreground_mean"]["Dice"], abs=2e-3)


def test_torchrun_does_the_same_and_resumes(config_file, tmp_path):
    def run(*more):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = ["-m", "volseg", "train", str(config_file), "--set", "parallel.strategy=spatial", *more]
        return subprocess.run([*launcher, *arguments], capture_output=True, encoding="utf-8", timeout=120, check=False)

    first = run("--set", "training.epochs=1")
    assert first.returncode == 0, first.stderr
    resumed = run("--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "| mean " in resumed.stdout
    assert [record.epoch for record in latest(tmp_path / "run").history] == [0, 1]


def test_auto_goes_on_as_it_began(config_file, configured, tmp_path, capfd):
    """The processes chose anew: slabs, where `parallel: auto` had begun with replicas, and sums in another order."""
    dealt, cut = "2 replicas of the network, each step's batch of 2 dealt 1 + 1", "every volume cut into 2 slabs"
    train_on(2, config_file, ["device=cpu", "training.epochs=1", "parallel.data=2"])  # as auto may choose
    capfd.readouterr()
    train_on(2, config_file, ["device=cpu", "parallel={strategy: auto, timeout: 500}"], resume=True)
    told = capfd.readouterr().err
    assert dealt in told
    assert cut not in told
    parallel = load_config(tmp_path / "run" / "config.yaml").parallel
    assert (parallel.data, parallel.timeout) == (2, 500), "how long to wait is said by whoever goes on"
    # On another number of devices it is chosen anew: of one there is nothing to choose.
    train(configured("training.epochs=3", "parallel=auto", "device=cpu"), resume=True)
    assert [record.epoch for record in latest(tmp_path / "run").history] == [0, 1, 2]


def test_a_fault_in_one_process_ends_all_and_is_told(config_file):
    with pytest.raises(ConfigError, match="no network is called 'Unett'"):
        train_on(2, config_file, ["network.name=Unett"])
    with pytest.raises(ConfigError, match=r"leave out parallel\.devices, or 1\), got 2"):
        train_on(2, config_file, ["device=cpu", "parallel={strategy: spatial, devices: 2}"])
