"""Gradient norms lie beside the losses in a checkpoint, and were taken for losses."""

import math
from dataclasses import replace

import torch

from volseg import Checkpoints, Training
from volseg.checkpointing.background import HostCopies
from volseg.checkpointing.file import LATEST
from volseg.workflow import load_checkpoint
from volseg.workflow.epoch import NORM


def make_training(**options):
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, 2, 3, padding=1)
    batches = [{"image": torch.randn(1, 1, 4, 4, 4), "label": torch.zeros(1, 4, 4, 4).long()} for _ in range(6)]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Training(network, torch.nn.functional.cross_entropy, optimizer, batches, epochs=1, **options)


def test_a_step_that_float16_leaves_out_keeps_no_checkpoint_from_being_written(tmp_path):
    """Its norm is infinite. The checkpoint was taken for one of a training that came apart, and left out in silence."""
    training = make_training()
    training.run()
    losses = [{"loss": torch.tensor(1.0), NORM: torch.tensor(math.inf)}]
    Checkpoints(tmp_path)._save(LATEST, replace(training.state(), losses=losses))
    assert math.isinf(load_checkpoint(tmp_path / LATEST).losses[0][NORM])


def test_norms_of_gathered_batches_are_kept():
    """The names of the first batch counted, which completes no step: all norms of the epoch were lost."""
    training = make_training(accumulate=4)
    for batch in training.batches:
        training._train_batch(batch)
    kept = HostCopies().take(training.state()).state.losses
    assert [math.isfinite(batch[NORM]) for batch in kept] == [False, False, False, True, False, True]
