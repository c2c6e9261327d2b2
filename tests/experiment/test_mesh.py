"""One process and several train the same network to the same weights, however they divide the work."""

import contextlib
import json
from pathlib import Path
from unittest import mock

import nibabel
import numpy as np
import pytest
import torch
from in_group import in_group
from training_hooks import At, press_ctrl_c

from tests.experiment.conftest import latest
from volseg.checkpointing.folder import RunFolder
from volseg.errors import ConfigError
from volseg.experiment import load_config, predict, train, train_on, validate
from volseg.experiment.building import build_training
from volseg.experiment.cases import choose_cases
from volseg.experiment.placement import placed_network
from volseg.experiment.placement.mesh_resolution import CaseReading, join_processes, resolve_mesh
from volseg.experiment.placement.placed_network import build_model, choose_device
from volseg.parallel.devices import get_process_rank
from volseg.workflow.distributed import GroupBatches
from volseg.workflow.precision import seed_everything

pytestmark = pytest.mark.usefixtures("ready_python")


class InDouble:
    """Batches with float64 images."""

    def __init__(self, batches):
        self.batches, self.batch_size = batches, batches.batch_size

    def __len__(self):
        return len(self.batches)

    def epoch(self, number, start=0):
        for batch in self.batches.epoch(number, start=start):
            yield {**batch, "image": batch["image"].double()}


def train_in_double(config_file, overrides):
    """Train one epoch; return the results."""
    config = load_config(config_file, overrides)
    join_processes(config)
    device, chosen = choose_device(config), choose_cases(config)
    config, mesh = resolve_mesh(config, device)
    seed_everything(config.seed)
    model = build_model(config, chosen.task, device, mesh=mesh).double()
    reading = CaseReading(config, mesh)
    prepared = reading.prepare(chosen)
    batches = reading.make_batches(prepared, chosen.task, model, device)
    if isinstance(batches, GroupBatches):
        batches.batches = batches.batches and InDouble(batches.batches)
    else:
        batches = InDouble(batches)
    training = build_training(config, model, batches, validation=None, hooks=[])
    training.run()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.float()
    validated = training.validate(reading.make_validation(model, chosen.task, prepared, mirror=False))
    return {"weights": weights, "losses": training.history[-1].losses, "scores": dict(validated.scores)}


def run(config_file, overrides, stop=None, resume=False):
    """Train, or go on; a run that is stopped at an epoch and a batch has saved."""
    hooks = [At(*stop, press_ctrl_c)] if stop and get_process_rank() == 0 else []
    with contextlib.suppress(KeyboardInterrupt):
        train(load_config(config_file, overrides), resume=resume, hooks=hooks)
        assert stop is None, "the run was to be stopped"
    torch.set_num_threads(1)


TERMS = (
    "losses=[{name: DiceLoss, output: dice}, {name: FocalLoss, factor: 2.0, output: focal}]",
    "patch.batch=5",
    "training.epochs=1",
    "training.iterations=3",
)

MESHES = [
    (2, ["parallel.data=2"]),
    (2, ["parallel.spatial=2"]),
    (2, ["parallel.data=2", "training.accumulate=2", "training.clip=0.1"]),
    (2, ["parallel={data: 2, pipeline: 2}"]),
    (4, ["parallel={data: 2, spatial: 2}"]),
]
"""Those of as many processes beside each other, here and in the tests below: another number starts them all anew."""


@pytest.fixture(scope="module")
def trained_alone():
    """Return the results of one process, by the terms of its training."""
    return {}


@pytest.mark.parametrize(("processes", "overrides"), MESHES, ids=lambda value: str(value))
def test_processes_train_as_one_in_float64(processes, overrides, config_file, trained_alone):
    terms = (*TERMS, *(text for text in overrides if "parallel" not in text))
    if terms not in trained_alone:
        trained_alone[terms] = train_in_double(config_file, terms)
    alone = trained_alone[terms]
    together = in_group(processes, train_in_double, config_file, [*TERMS, *overrides])
    for one in together:
        # Sums over voxels and samples in another order: some units in the last of 16 digits, over three steps.
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(one["losses"], alone["losses"], rtol=1e-6, atol=1e-7)  # kept in float32
        assert one["scores"] == alone["scores"]


DETERMINISTIC = ("training.deterministic=true", "patch.batch=4", "training.epochs=1")


@pytest.fixture(scope="module")
def weights_alone():
    """Return the weights of one process, by its mesh."""
    return {}


@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (4, "parallel.data=4"),
        (4, "parallel={data: 2, spatial: 2}"),
        (2, "parallel={data: 2, spatial: 2}"),
        (2, "parallel.data=4"),
    ],
)
def test_any_number_of_processes_gives_the_same_bits(processes, mesh, config_file, tmp_path, weights_alone):
    overrides = [*DETERMINISTIC, mesh]
    if mesh not in weights_alone:
        run(config_file, [*overrides, f"output={tmp_path / 'alone'}"])
        weights_alone[mesh] = latest(tmp_path / "alone").model
    in_group(processes, run, config_file, [*overrides, f"output={tmp_path / 'together'}"])
    together = latest(tmp_path / "together").model
    assert all(torch.equal(together[name], tensor) for name, tensor in weights_alone[mesh].items())


def test_a_deterministic_run_moves_from_two_processes_to_one_and_back(config_file, tmp_path):
    overrides = [*DETERMINISTIC, "parallel.data=2", "training.epochs=2", "training.iterations=4", "network.dropout=0.2"]
    in_group(2, run, config_file, [*overrides, f"output={tmp_path / 'whole'}"])
    moved = [*overrides, f"output={tmp_path / 'moved'}"]
    in_group(2, run, config_file, moved, (0, 2))
    run(config_file, moved, (1, 1), True)
    in_group(2, run, config_file, moved, None, True)
    expected, found = latest(tmp_path / "whole"), latest(tmp_path / "moved")
    assert [record.losses for record in found.history] == [record.losses for record in expected.history]
    for name, tensor in expected.model.items():
        assert torch.equal(found.model[name], tensor), name


def test_a_run_goes_on_on_another_mesh(config_file, tmp_path):
    overrides = ["training.epochs=2", "training.iterations=4", "patch.batch=3"]
    run(config_file, [*overrides, f"output={tmp_path / 'whole'}"])
    moved = [*overrides, f"output={tmp_path / 'moved'}"]
    run(config_file, moved, (0, 2))
    in_group(2, run, config_file, [*moved, "parallel.data=2"], (0, 3), True)
    in_group(2, run, config_file, [*moved, "parallel.spatial=2"], (1, 1), True)
    run(config_file, moved, None, True)
    expected, found = latest(tmp_path / "whole"), latest(tmp_path / "moved")
    assert found.progress == expected.progress == (2, 0)
    # float32: sums over replicas and shards add up in another order, and eight optimizer steps carry that on.
    torch.testing.assert_close(found.model, expected.model, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(found.history, expected.history, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-3, atol=1e-5)


def build_where_measurements_differ(config_file):
    """Build a model for which one process measures channels last as faster."""
    config = load_config(config_file, ["parallel.data=2"])
    join_processes(config)
    device, chosen = choose_device(config), choose_cases(config)
    config, mesh = resolve_mesh(config, device)
    layouts = [torch.contiguous_format, torch.channels_last_3d]
    with mock.patch.object(placed_network, "faster_layout", return_value=layouts[mesh.mesh.replica]):
        model = build_model(config, chosen.task, device, mesh=mesh)
    return [parameter.stride() for parameter in model.parameters()]


def test_replicas_lie_alike_in_memory_whatever_each_measured(config_file):
    first, second = in_group(2, build_where_measurements_differ, config_file)
    assert first == second


def diverge(config_file, overrides):
    try:
        run(config_file, overrides)
    except Exception as fault:
        return type(fault).__name__, str(fault)
    return None


def test_a_loss_that_is_not_finite_ends_all_processes_and_names_the_cases_of_the_whole_batch(config_file):
    overrides = ["parallel.data=2", "optimizer.lr=1.0e+30", "training.clip=null", "training.iterations=9"]
    told = in_group(2, diverge, config_file, overrides)
    assert told[0] == told[1]
    kind, words = told[0]
    assert kind == "NonFiniteLossError"
    assert words.partition("; cases: ")[2].partition(".")[0].count(",") == 1  # a batch of two, a case in each process


def try_to_run(config_file, overrides, resume):
    try:
        run(config_file, overrides, resume=resume)
    except ConfigError as refused:
        return str(refused)
    return None


def test_a_deterministic_run_keeps_how_it_was_shared(config_file, tmp_path):
    overrides = ["training.deterministic=true", "training.epochs=1"]
    assert in_group(2, try_to_run, config_file, overrides, False) == [None, None]
    kept = load_config(tmp_path / "run" / "config.yaml").parallel
    assert (kept.data, kept.spatial) == (2, 1)
    refused = try_to_run(config_file, [*overrides, "training.epochs=2"], True)
    assert "was started with parallel.data: 2, parallel.spatial: 1 and training.deterministic: true" in refused
    assert "got 1 and 1; restore both numbers (fewer processes may compute them)" in refused
    assert try_to_run(config_file, [*overrides, "training.epochs=2", "parallel.data=2"], True) is None


def test_replicas_share_no_loss_that_mixes_the_samples_of_a_batch(configured):
    config = configured("training.deterministic=true", "parallel.data=2", "losses=[{name: DiceLoss, batch: true}]")
    with pytest.raises(ConfigError, match="DiceLoss is not a mean over the samples of a batch"):
        train(config)
    assert not config.folder.exists()


def read(config):
    """Prepare the cases."""
    chosen = choose_cases(config)
    settled, mesh = resolve_mesh(config, torch.device("cpu"))
    reading = CaseReading(settled, mesh)
    prepared = reading.prepare(chosen)
    return {
        "reads": reading.mesh.reads,
        "training": len(prepared.training),
        "validation": len(prepared.validation),
        "order": len(prepared.order),
    }


def test_a_follower_reads_no_case(configured):
    leader, follower = in_group(2, read, configured("parallel.spatial=2"))
    assert leader == {"reads": True, "training": 4, "validation": 2, "order": 2}
    assert follower == {"reads": False, "training": 0, "validation": 0, "order": 2}


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
    ("mesh", "says"), [pytest.param([], DEALT, id="dealt"), pytest.param(["parallel.spatial=2"], CUT, id="cut")]
)
def test_processes_started_by_gpus(mesh, says, plain, config_file, tmp_path, capfd):
    mesh = ["device=cpu", *mesh]
    train_on(2, config_file, mesh)
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


def test_a_fault_in_one_process_ends_all_and_is_told(config_file):
    with pytest.raises(ConfigError, match="no network is called 'Unett'"):
        train_on(2, config_file, ["network.name=Unett"])
    with pytest.raises(ConfigError, match=r"parallel\.devices must be 1 or left out, got 2"):
        train_on(2, config_file, ["device=cpu", "parallel={strategy: spatial, devices: 2}"])
