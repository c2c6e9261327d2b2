"""Gradient norms lie beside the losses in a checkpoint, and were taken for losses."""

import math
from dataclasses import replace

import torch
from tiny_trainings import plain_training

from volseg import Checkpoints
from volseg.checkpointing.file import LATEST, copy_to_host
from volseg.workflow import load_checkpoint
from volseg.workflow.epoch import NORM


def test_a_step_that_float16_leaves_out_keeps_no_checkpoint_from_being_written(tmp_path):
    """Its norm is infinite. The checkpoint was taken for one of a training that came apart, and left out in silence."""
    training = plain_training(batches=6)
    training.run()
    losses = [{"loss": torch.tensor(1.0), NORM: torch.tensor(math.inf)}]
    Checkpoints(tmp_path)._save(LATEST, replace(training.state(), losses=losses))
    assert math.isinf(load_checkpoint(tmp_path / LATEST).losses[0][NORM])


def test_norms_of_gathered_batches_are_kept():
    """The names of the first batch counted, which completes no step: all norms of the epoch were lost."""
    training = plain_training(batches=6, accumulate=4)
    for batch in training.batches:
        training._train_batch(batch)
    kept = copy_to_host(training.state(), {}).losses
    assert [math.isfinite(batch[NORM]) for batch in kept] == [False, False, False, True, False, True]
