"""A group's recorded steps train as its eager ones, and the group ends.

``python test_captured_group.py FOLDER`` in each process of a group with GPUs writes what it found.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from torch import nn

from volseg.parallel import ModelParallel, launch
from volseg.parallel.spatial.transport.mesh import start_group
from volseg.workflow import Hook, Named, Training
from volseg.workflow.spatial_group import GroupBatches


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


class RunTheModel(Hook):
    """What a validation between two epochs does to streams and generators."""

    def on_epoch_end(self, training, record):
        training.network.eval()
        with torch.no_grad():
            training.network(torch.ones(1, 1, 10, 8, 8)).full_tensor()
        if dist.get_rank() == 0:  # the leading process draws more random numbers than the others
            torch.rand(3, device=training.device)


def trained(capture, dropout=(), epochs=2):
    model = ModelParallel(network(dropout), strategy="spatial")
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=device.type == "cuda")
    batches = GroupBatches(model, Batches() if dist.get_rank() == 0 else None, len(Batches()))
    training = Training(
        Named(model, ["image"], ["logits"]),
        Named(loss, ["logits", "label"], ["loss"]),
        optimizer,
        batches,
        epochs=epochs,
        precision="fp32",
        clip=1.0,
        schedule=lambda progress: 1 - progress / 2,
        average_decay=0.9,
        capture=capture,
        hooks=[RunTheModel()],
    )
    training.run()
    return training


def found(training):
    weights = torch.cat([p.detach().flatten() for p in training.network.parameters()]).cpu()
    captured = training._captured
    return {
        "losses": [record.losses["loss"] for record in training.history],
        "weights": weights.tolist(),
        "recorded": captured.num_recorded if captured else None,
        "refused": captured.refused if captured else None,
    }


def trained_thrice():
    return {
        "eager": found(trained(capture=False)),
        "recorded": found(trained(capture=True)),
        # Masks of recorded steps are others than those of eager ones; what all processes must share is the weights.
        "dropout": found(trained(capture=True, dropout=[nn.Dropout3d(0.5), nn.Dropout(0.2)])),
    }


def follow(folder):
    torch.backends.cudnn.allow_tf32 = False
    start_group()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(trained_thrice()))
    dist.destroy_process_group()
    (folder / f"{os.environ['RANK']}.ended").touch()


def launched(folder):
    launch([__file__, str(folder)], 2)
    assert all((folder / f"{rank}.ended").exists() for rank in range(2))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_same_training(first, second):
    for name in first:
        assert first[name]["losses"] == second[name]["losses"]
        assert first[name]["weights"] == second[name]["weights"]
    # float32: convolutions may take another algorithm while recorded, and Adam divides by small numbers.
    assert first["recorded"]["losses"] == pytest.approx(first["eager"]["losses"], rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(first["recorded"]["weights"]), torch.tensor(first["eager"]["weights"]), rtol=1e-3, atol=1e-4
    )


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
