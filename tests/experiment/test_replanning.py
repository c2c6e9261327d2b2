"""A training step that is out of memory: what is said, and how the run goes on in another way, once."""

import json

import pytest
import torch

from volseg import Checkpoints, Hook
from volseg.errors import CheckpointError, ConfigError, OutOfMemoryError
from volseg.experiment import RunFolder, train
from volseg.parallel import ModelParallel
from volseg.workflow import load_checkpoint

REPLAN = "parallel.on_oom=replan"


def take_all_memory():
    """Ask torch's allocator for more than any machine has."""
    torch.empty(1 << 50, dtype=torch.uint8)


class TooMuch(Hook):
    """Take all memory at a batch, in the network's first way, or in whatever way it runs."""

    def __init__(self, epoch, position, *, always=False):
        self.at, self.always, self.seen = (epoch, position), always, []

    def on_batch_begin(self, training, batch):
        is_cut = isinstance(training.network, ModelParallel)
        self.seen.append((training.epoch, training.position, is_cut))
        if (training.epoch, training.position) == self.at and (self.always or not is_cut):
            take_all_memory()

    def on_batch_end(self, training, fields):
        next(hook for hook in training.hooks if isinstance(hook, Checkpoints))._finish()  # the next one can be taken


def latest(config):
    return load_checkpoint(config.folder / "checkpoints" / "latest.pt")


def test_without_being_asked_a_run_ends_and_says_what_takes_less(configured):
    with pytest.raises(OutOfMemoryError) as caught:
        train(configured(), hooks=[TooMuch(0, 1)])
    told = str(caught.value)
    assert told.startswith("out of memory on cpu, which has ")
    assert "Tried: patch.size [16, 16, 16], patch.batch 2" in told
    assert "at train, epoch 0, 1" in told
    assert "\n  --set parallel.strategy=spatial --set parallel.devices=1 --set parallel.checkpoint=all   " in told
    assert told.endswith("parallel.checkpoint: all (recomputes activations)")


def test_what_is_said_can_be_pasted(configured, tmp_path):
    with pytest.raises(OutOfMemoryError) as caught:
        train(configured(), hooks=[TooMuch(1, 1)])
    line = next(line for line in str(caught.value).splitlines() if line.startswith("  --set"))
    words = line.split("   ")[0].split()
    assert words[::2] == ["--set"] * 3
    outcome = train(configured(*words[1::2]), resume=True)
    assert [record.epoch for record in outcome.history] == [0, 1]


def test_a_run_goes_on_from_its_checkpoint_in_another_way(configured, caplog):
    """Six batches, of which the fifth fails at first: nothing is trained twice, and nothing is left out."""
    config = configured(REPLAN, "training.checkpoint_minutes=0")
    hook = TooMuch(1, 1)
    with caplog.at_level("INFO"):
        outcome = train(config, hooks=[hook])
    assert hook.seen == [
        *((0, position, False) for position in range(3)),
        (1, 0, False),
        (1, 1, False),
        (1, 1, True),
        (1, 2, True),
    ]
    words = "was out of memory at train, epoch 1, 1; since then, and once only, the run goes on with --set parallel."
    assert caplog.text.count(words) == 1
    record = json.loads((config.folder / "replanned.json").read_text(encoding="utf-8"))
    assert record["parallel"]["checkpoint"] == "all"
    assert record["failure"]["tried"]["checkpoint"] is None
    assert words in (config.folder / "report.md").read_text(encoding="utf-8")
    aside = configured(f"output={config.folder.parent / 'whole'}")
    whole = train(aside)
    # float32: the strategy that recomputes adds up in another order, over two steps.
    torch.testing.assert_close(latest(config).model, latest(aside).model, rtol=1e-3, atol=1e-5)
    assert outcome.history[0].losses == whole.history[0].losses


def test_before_the_first_checkpoint_it_begins_again(configured):
    config, hook = configured(REPLAN), TooMuch(0, 1)
    train(config, hooks=[hook])
    assert hook.seen[:4] == [(0, 0, False), (0, 1, False), (0, 0, True), (0, 1, True)]
    assert latest(config).progress == (2, 0)


def test_a_second_time_ends_the_run_even_after_it_was_resumed(configured):
    config = configured(REPLAN)
    with pytest.raises(OutOfMemoryError, match=r"since then, and once only, .* A second time ends the run\."):
        train(config, hooks=[TooMuch(1, 1, always=True)])
    hook = TooMuch(1, 1, always=True)
    with pytest.raises(OutOfMemoryError, match="A second time ends the run"):
        train(config, resume=True, hooks=[hook])
    assert all(is_cut for _, _, is_cut in hook.seen)


class Fails(Hook):
    """Lose the run at a batch of its second way."""

    def on_batch_end(self, training, fields):
        if isinstance(training.network, ModelParallel) and training.epoch == 1:
            raise InterruptedError


def test_a_run_that_was_replanned_and_lost_does_not_fall_back(configured, caplog):
    config = configured(REPLAN)
    with pytest.raises(InterruptedError):
        train(config, hooks=[TooMuch(0, 1), Fails()])
    hook = TooMuch(9, 9)
    with caplog.at_level("INFO"):
        train(config, resume=True, hooks=[hook])
    assert hook.seen
    assert all(is_cut for _, _, is_cut in hook.seen)
    assert "the run goes on with --set parallel.strategy=spatial" in caplog.text


def test_what_is_asked_for_anew_is_tried(configured, caplog):
    config = configured(REPLAN)
    with pytest.raises(InterruptedError):
        train(config, hooks=[TooMuch(0, 1), Fails()])
    hook = TooMuch(9, 9)
    with caplog.at_level("INFO"):
        train(configured(REPLAN, "parallel={strategy: pipeline, devices: 2}"), resume=True, hooks=[hook])
    assert "is about another mesh than is asked for now" in caplog.text


def test_a_record_that_is_none_is_refused(configured):
    config = configured(REPLAN, "training.epochs=1")
    train(config)
    (config.folder / "replanned.json").write_text('{"asked": 3}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"replanned\.json should say how the run goes on .* remove it"):
        train(configured(REPLAN), resume=True)


def test_a_validation_without_memory_is_no_matter_of_steps(configured):
    class Full(Hook):
        def on_training_begin(self, training):
            training.network.register_forward_hook(
                lambda network, inputs, output: None if network.training else take_all_memory()
            )

    with pytest.raises(OutOfMemoryError, match=r"inference\.window \(prediction\)"):
        train(configured(REPLAN), hooks=[Full()])
    assert not (RunFolder(configured().folder).path / "replanned.json").exists()


def test_the_same_bits_and_another_way_exclude_each_other(configured):
    with pytest.raises(ConfigError, match="promises the same bits from begin to end; leave out one of them"):
        configured(REPLAN, "training.deterministic=true")
