"""A training that is stopped at any point, by a real signal, ends bit for bit where the uninterrupted one ends.

Its checkpoints are written by the real thread, as often as it can: after every batch.
"""

import os
import signal

import pytest
import torch
from training_hooks import At, raising

from tests.workflow.conftest import assert_equal
from volseg.checkpointing.file import LATEST
from volseg.checkpointing.state import CLOCKED
from volseg.workflow import Checkpoints, Hook, load_checkpoint
from volseg.workflow.checks import stop_if_requested

OPTIONS = {"average_decay": 0.9, "schedule": lambda progress: 1 - progress, "clip": 1.0, "precision": "fp32"}


class Drawing:
    """A validation of four cases that draws random numbers, as one with dropout at test time does."""

    examples = ()

    def __init__(self, signal_at=None):
        self.signal_at, self.calls = signal_at, 0

    def __call__(self):
        self.score, self.scores = 0.0, {}
        for _ in range(4):
            stop_if_requested()
            self.score += float(torch.rand(()))
            self.calls += 1
            if self.calls == self.signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
        return self


class SignalAt(Hook):
    """Send SIGTERM at an event, after so many batches of an epoch."""

    def __init__(self, event, epoch=0, position=0):
        self.at = epoch, position
        setattr(self, event, self._look)

    def _look(self, training, *_):
        if (training.epoch, training.position) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def content(path):
    """Return everything in a checkpoint but the times."""
    state = load_checkpoint(path).as_checkpoint()
    for record in (*state["history"], *([state["best"]] if state["best"] else [])):
        for clocked in CLOCKED:
            record.pop(clocked)
    del state["seconds"]
    return state


@pytest.fixture
def stopped_and_whole(make_training, tmp_path):
    """Stop a training, continue it to its end; return its results and those of one without a stop."""

    def run(point, *, signal_in_validation=None, progress, **options):
        options = {**OPTIONS, **options}
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        make_training(validation=Drawing(), hooks=[Checkpoints(whole)], **options).run()
        hooks = [Checkpoints(cut, every_minutes=0), *([point] if point else [])]
        with pytest.raises(SystemExit) as ended:
            make_training(validation=Drawing(signal_in_validation), hooks=hooks, **options).run()
        assert ended.value.code == 143
        state = load_checkpoint(cut / LATEST)
        assert state.progress == progress
        resumed = make_training(seed=99, validation=Drawing(), hooks=[Checkpoints(cut, every_minutes=0)], **options)
        resumed.load_state_dict(state)
        resumed.run()
        assert_equal(content(cut / LATEST), content(whole / LATEST))

    return run


@pytest.mark.parametrize(
    ("event", "at", "progress"),
    [
        ("on_training_begin", (0, 0), (0, 1)),
        ("on_batch_begin", (0, 0), (0, 1)),
        ("on_batch_end", (0, 4), (0, 4)),
        ("on_batch_end", (1, 6), (1, 6)),
        ("on_epoch_end", (1, 0), (1, 1)),
        ("on_epoch_begin", (2, 0), (2, 1)),
        ("on_batch_end", (2, 6), (2, 6)),
    ],
)
def test_between_batches(stopped_and_whole, event, at, progress):
    stopped_and_whole(SignalAt(event, *at), progress=progress)


@pytest.mark.parametrize(("call", "progress"), [(1, (0, 6)), (2, (0, 6)), (7, (1, 6)), (11, (2, 6))])
def test_in_a_validation_whose_numbers_are_drawn_again(stopped_and_whole, call, progress):
    """A stopped validation left torch's generator in a later state."""
    stopped_and_whole(None, signal_in_validation=call, progress=progress)


@pytest.mark.parametrize(("position", "written"), [(1, 4), (3, 4), (4, 4), (5, 6)])
def test_between_batches_that_share_a_step_it_waits_for_the_step(stopped_and_whole, position, written):
    stopped_and_whole(SignalAt("on_batch_end", 1, position), progress=(1, written), accumulate=4)


def test_without_an_average_and_with_validations_now_and_then(stopped_and_whole):
    stopped_and_whole(SignalAt("on_batch_end", 0, 6), progress=(0, 6), average_decay=None, validate_every=2)


class Killed(Exception):  # noqa: N818
    """Simulates SIGKILL after the disk is written."""


@pytest.mark.parametrize(("epoch", "position"), [(0, 1), (0, 5), (1, 3), (2, 6)])
def test_a_checkpoint_of_any_time_is_gone_on_from(make_training, tmp_path, epoch, position):
    """At whichever batch the thread was when the process was lost."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    make_training(hooks=[Checkpoints(whole)], **OPTIONS).run()
    with pytest.raises(Killed):
        make_training(hooks=[Checkpoints(cut, every_minutes=0), At(epoch, position, raising(Killed))], **OPTIONS).run()
    state = load_checkpoint(cut / LATEST)
    assert (0, 0) < state.progress <= (epoch, position)
    resumed = make_training(seed=99, hooks=[Checkpoints(cut)], **OPTIONS)
    resumed.load_state_dict(state)
    resumed.run()
    assert_equal(content(cut / LATEST), content(whole / LATEST))
