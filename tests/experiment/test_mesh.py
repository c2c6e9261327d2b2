"""One process and several train the same network to the same weights, whichever way they share the work."""

import contextlib
import os
import signal

import pytest
import torch
from in_group import in_group

from volseg.experiment import load_config, train
from volseg.experiment.building import build_model, build_training, choose_device
from volseg.experiment.cases import choose_cases
from volseg.experiment.reading import choose_reading
from volseg.experiment.settling import join_processes, settle_mesh
from volseg.workflow import Hook, load_checkpoint
from volseg.workflow.randomness import seed_everything
from volseg.workflow.spatial_group import GroupBatches


class InDouble:
    """Batches whose images are float64."""

    def __init__(self, batches):
        self.batches, self.batch_size = batches, batches.batch_size

    def __len__(self):
        return len(self.batches)

    def epoch(self, number, start=0):
        for batch in self.batches.epoch(number, start=start):
            yield {**batch, "image": batch["image"].double()}


def train_in_double(config_file, overrides):
    """Train one epoch; return what came of it."""
    config = load_config(config_file, overrides)
    join_processes(config)
    device, chosen = choose_device(config), choose_cases(config)
    config, mesh = settle_mesh(config, chosen.task, device)
    seed_everything(config.seed)
    model = build_model(config, chosen.task, device, mesh=mesh).double()
    reading = choose_reading(config, mesh)
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


class StopAt(Hook):
    """Send this process a Ctrl-C once a batch is done."""

    def __init__(self, epoch, position):
        self.at = (epoch, position)

    def on_batch_end(self, training, fields):
        del fields
        if (training.epoch, training.position) == self.at and training.is_main_process:
            os.kill(os.getpid(), signal.SIGINT)


def run(config_file, overrides, stop=None, resume=False):
    """Train, or go on; a run that is stopped at an epoch and a batch has saved."""
    with contextlib.suppress(KeyboardInterrupt):
        train(load_config(config_file, overrides), resume=resume, hooks=[StopAt(*stop)] if stop else [])
        assert stop is None, "the run was to be stopped"
    torch.set_num_threads(1)


TERMS = (
    "losses=[{name: DiceLoss, output: dice}, {name: FocalLoss, weight: 2.0, output: focal}]",
    "patch.batch=5",
    "training.epochs=1",
    "training.iterations=3",
)

MESHES = [
    (2, ["parallel.data=2"]),
    (2, ["parallel.spatial=2"]),
    (4, ["parallel.data=4"]),
    (4, ["parallel={data: 2, spatial: 2}"]),
    (2, ["parallel.data=2", "training.accumulate=2", "training.clip=0.1"]),
]


@pytest.mark.parametrize(("processes", "overrides"), MESHES, ids=lambda value: str(value))
def test_processes_train_as_one_in_float64(processes, overrides, config_file):
    alone = train_in_double(config_file, [*TERMS, *(text for text in overrides if "parallel" not in text)])
    together = in_group(processes, train_in_double, config_file, [*TERMS, *overrides])
    for one in together:
        # Sums over voxels and samples in another order: some units in the last of 16 digits, over three steps.
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(one["losses"], alone["losses"], rtol=1e-6, atol=1e-7)  # kept in float32
        assert one["scores"] == alone["scores"]


DETERMINISTIC = ("training.deterministic=true", "patch.batch=4", "training.epochs=1")


@pytest.mark.parametrize("mesh", ["parallel.data=4", "parallel={data: 2, spatial: 2}", "parallel.spatial=2"])
def test_any_number_of_processes_gives_the_same_bits(mesh, config_file, tmp_path):
    def weights(processes):
        folder = tmp_path / str(processes)
        overrides = [*DETERMINISTIC, mesh, f"output={folder}"]
        if processes == 1:
            run(config_file, overrides)
        else:
            in_group(processes, run, config_file, overrides)
        return load_checkpoint(folder / "checkpoints" / "latest.pt").model

    alone = weights(1)
    for processes in (2,) if mesh == "parallel.spatial=2" else (2, 4):
        together = weights(processes)
        assert all(torch.equal(together[name], tensor) for name, tensor in alone.items()), processes


def latest(folder):
    return load_checkpoint(folder / "checkpoints" / "latest.pt")


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
