"""The benchmark of faults compares what two trainings leave behind, without what the wall clock decides."""

import sys
from pathlib import Path

import torch
from torch import nn

from volseg.checkpointing.file import LATEST
from volseg.workflow import Checkpoints, Named, Training, load_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from faults import fingerprint


class Batches:
    def __len__(self) -> int:
        return 2

    def epoch(self, number, start=0):
        for position in range(start, 2):
            generator = torch.Generator().manual_seed(2 * number + position)
            image = torch.randn(1, 1, 4, 4, 4, generator=generator)
            yield {"image": image, "label": torch.zeros(1, 4, 4, 4).long(), "case": ["a"]}


def train_in(folder: Path, lr: float) -> str:
    torch.manual_seed(0)
    network = nn.Conv3d(1, 2, 1)
    Training(
        Named(network, inputs=["image"], outputs=["logits"]),
        Named(nn.functional.cross_entropy, inputs=["logits", "label"], outputs=["loss"]),
        torch.optim.SGD(network.parameters(), lr=lr),
        Batches(),
        epochs=2,
        hooks=[Checkpoints(folder)],
    ).run()
    return fingerprint(load_checkpoint(folder / LATEST))


def test_two_runs_of_one_training_have_one_fingerprint(tmp_path: Path) -> None:
    """Epochs were given a speed and the seconds of their validation, and every run differed from every other."""
    fingerprints = [train_in(tmp_path / name, lr) for name, lr in (("one", 0.1), ("again", 0.1), ("other", 0.2))]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
