"""Recorded steps of a group train as eager ones; Ctrl-C in one process stops all, with a checkpoint.

``python test_training_group.py FOLDER`` in each process writes what it found.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from torch import nn

from volseg.parallel import ModelParallel, launch
from volseg.parallel.processes.group import start_group
from volseg.workflow import Hook, Named, Training
from volseg.workflow.checks import stop_if_requested
from volseg.workflow.distributed import FollowedModel, GroupBatches, GroupValidation

pytestmark = pytest.mark.usefixtures("ready_python")


class Batches:
    """Batches of two sizes: the first is recorded, the second comes too seldom."""

    def __len__(self):
        return 8

    def epoch(self, number, start=0):
        for position in range(start, len(self)):
            generator = torch.Generator().manual_seed(100 * number + position)
            image = torch.randn(1, 1, 12 if position == 6 else 16, 8, 8, generator=generator)
            yield {"image": image, "label": (image > 0).to(torch.uint8), "case": [f"case_{position}"]}


def network(dropout):
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(), *dropout]
    return nn.Sequential(*layers, nn.Conv3d(4, 2, 1))


def loss(logits, label):
    return nn.functional.cross_entropy(logits, label[:, 0].long())


def build_training(model, batches, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    named = Named(model, ["image"], ["logits"]), Named(loss, ["logits", "label"], ["loss"])
    return Training(*named, optimizer, batches, **options)


class RunTheModel(Hook):
    """What a validation between two epochs does to streams and generators."""

    def on_epoch_end(self, training, record):
        training.network.eval()
        with torch.no_grad():
            training.network(torch.ones(1, 1, 10, 8, 8)).full_tensor()
        if dist.get_rank() == 0:  # the leading process draws more random numbers than the others
            torch.rand(3, device=training.device)


def trained(record, dropout=(), epochs=2):
    model = ModelParallel(network(dropout), strategy="spatial")
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=device.type == "cuda")
    batches = GroupBatches(model, Batches() if dist.get_rank() == 0 else None, len(Batches()))
    training = build_training(
        model,
        batches,
        optimizer,
        epochs=epochs,
        precision="fp32",
        clip=1.0,
        schedule=lambda progress: 1 - progress / 2,
        average_decay=0.9,
        record=record,
        hooks=[RunTheModel()],
    )
    training.run()
    return training


def found(training):
    weights = torch.cat([p.detach().flatten() for p in training.network.parameters()]).cpu()
    recorded = training.step.recorded
    return {
        "losses": [record.losses["loss"] for record in training.history],
        "weights": weights.tolist(),
        "recorded": recorded.num_recorded if recorded else None,
        "refused": recorded.refused if recorded else None,
    }


class InterruptedValidation:
    """Three cases; Ctrl-C comes during the second, to the leading process only."""

    examples = ()

    def __init__(self, model):
        self.model, self.judged = FollowedModel(model), 0

    def __call__(self):
        with torch.no_grad():
            for case in range(3):
                stop_if_requested()
                self.model(torch.ones(1, 1, 8, 4, 4)).full_tensor()
                self.judged += 1
                if case == 1:
                    os.kill(os.getpid(), signal.SIGINT)


class Saved(Hook):
    at = None

    def on_interrupt(self, training):
        self.at = [training.epoch, training.position, len(training.state().losses)]


def interrupted():
    model = ModelParallel(network(()), strategy="spatial")
    leads = dist.get_rank() == 0
    validation = InterruptedValidation(model) if leads else None
    saved = Saved()
    batches = GroupBatches(model, Batches() if leads else None, len(Batches()))
    validation_of_group = GroupValidation(model, validation, None)
    training = build_training(model, batches, epochs=3, validation=validation_of_group, hooks=[saved])
    ended = "to its end"
    try:
        training.run()
    except KeyboardInterrupt:
        ended = "by Ctrl-C"
    return {"ended": ended, "saved": saved.at, "judged": validation.judged if validation else None}


def trained_thrice():
    return {
        "eager": found(trained(record=False)),
        "recorded": found(trained(record=True)),
        # Masks of recorded steps are others than those of eager ones; what all processes must share is the weights.
        "dropout": found(trained(record=True, dropout=[nn.Dropout3d(0.5), nn.Dropout(0.2)])),
    }


def follow(folder):
    torch.backends.cudnn.allow_tf32 = False
    start_group()
    results = {"interrupted": interrupted(), "trained": trained_thrice()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()
    (folder / f"{os.environ['RANK']}.ended").touch()


def launched(folder):
    launch([__file__, str(folder)], 2)
    assert all((folder / f"{rank}.ended").exists() for rank in range(2))
    results = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert_ended_together(*(result["interrupted"] for result in results))
    return [result["trained"] for result in results]


def assert_ended_together(first, second):
    """The follower got no signal, but stops where the leader does."""
    assert first == {"ended": "by Ctrl-C", "saved": [0, 8, 8], "judged": 2}
    assert second == {"ended": "by Ctrl-C", "saved": [0, 8, 8], "judged": None}


def assert_same_training(first, second):
    for name in first:
        assert first[name]["losses"] == second[name]["losses"]
        assert first[name]["weights"] == second[name]["weights"]
    # float32: convolutions may take another algorithm while recorded, and Adam divides by small numbers.
    assert first["recorded"]["losses"] == pytest.approx(first["eager"]["losses"], rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(first["recorded"]["weights"]), torch.tensor(first["eager"]["weights"]), rtol=1e-3, atol=1e-4
    )


def look_together():
    """Return when each process checks again, at 0.1 and 0.5 s a batch, and the effect of one's signal."""
    model = network(())
    training = build_training(model, Batches(), epochs=1)
    training._stopping.interval.most = 32  # as on a GPU
    first = training._stopping.agree((0.1, 0.5)[dist.get_rank()])
    batches = training._stopping.interval.batches
    if dist.get_rank() == 1:
        training._stopping._interruption.take(signal.SIGHUP)
    return first, batches, training._stopping.agree(0.1), training._stopping._interruption.signal


def test_processes_look_after_equally_many_batches_by_the_time_of_the_slowest():
    """Else one would wait in a collective while the others train on."""
    assert in_group(2, look_together) == [(False, 4, True, signal.SIGHUP)] * 2


def test_the_group_leaves_the_validation_together():
    assert_ended_together(*in_group(2, interrupted))


def test_processes_without_gpus_train_alike_and_record_nothing():
    first, second = in_group(2, trained_thrice)
    assert_same_training(first, second)
    assert first["recorded"]["recorded"] is None


@pytest.mark.multi_gpu
@pytest.mark.timeout(200)  # a group that does not end would wait for ever
def test_recorded_steps_of_two_gpus_equal_eager_ones_and_the_group_ends(tmp_path):
    first, second = launched(tmp_path)
    assert_same_training(first, second)
    for results in (first, second):
        for name in ("recorded", "dropout"):
            assert results[name]["recorded"] == 1, results[name]["refused"]
            assert results[name]["refused"] is None


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
