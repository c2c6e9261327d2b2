"""Patches that grow during a training."""

import json
from types import SimpleNamespace

import pytest
import torch
from training_hooks import At, press_ctrl_c

from tests.experiment.conftest import latest, write_config
from volseg.errors import ConfigError
from volseg.estimate.candidate import Candidate, Estimate, list_candidates, relieve
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment import load_config, train
from volseg.experiment.placement import replanning
from volseg.experiment.placement.alternatives import Answer, list_settings
from volseg.experiment.placement.training_work import describe_freedom
from volseg.monitoring.memory import FirstSteps
from volseg.parallel import ModelParallel
from volseg.workflow import Hook

GROWTH = ("patch.growth=[{until: 0.4, size: [8, 8, 8]}, {until: 0.7, size: [8, 16, 12]}]", "training.epochs=4")
SIZES = [(8, 8, 8), (8, 8, 8), (8, 16, 12), (16, 16, 16)]


class Watch(Hook):
    """Note the size of each batch."""

    def __init__(self):
        self.seen, self.released = [], []

    def on_training_begin(self, training):
        release = training.step.release
        training.step.release = lambda: (self.released.append(training.epoch), release())

    def on_batch_end(self, training, fields):
        self.seen.append((training.epoch, tuple(fields["image"].shape[2:])))


@pytest.fixture(scope="module")
def grown(task, tmp_path_factory):
    """Return a training whose patches grow twice, its batches, and its config."""
    folder = tmp_path_factory.mktemp("grown")
    watch = Watch()
    return train(load_config(write_config(task, folder), GROWTH), hooks=[watch]), watch


def test_each_epoch_has_the_size_of_its_part_of_the_training(grown):
    outcome, watch = grown
    assert watch.seen == [(epoch, size) for epoch, size in enumerate(SIZES) for _ in range(3)]
    assert len(outcome.history) == 4


def test_round_off_gives_no_epoch_more_of_the_smaller_size(configured):
    config = configured("patch.growth=[{until: 0.55, size: [8, 8, 8]}]")
    assert [config.patch.size_in(epoch, 100)[0] for epoch in (54, 55)] == [8, 16]  # 0.55 * 100 > 55


def test_a_plan_for_patches_that_grow_lists_nothing_that_the_training_refuses(configured):
    config = configured(*GROWTH)
    free = describe_freedom(config, torch.float32, has_fast_kernels=True)
    listed = list_candidates(4, 4, config.patch.size, free)
    assert [(each.data, each.spatial, each.pipeline) for each in listed] == [(1, 1, 1), (4, 1, 1)]
    for each in (*listed, *(less for one in listed for less in relieve(one, free))):
        settled = configured(*GROWTH, "patch.batch=4", *list_settings(each))
        settled.with_mesh(settled.mesh(each.num_gpus))


def test_what_grows_may_be_computed_again_and_not_cut(configured, grown):
    """`on_oom: replan` found no option, because recomputation was refused together with cuts."""
    recomputed = ["parallel={strategy: spatial, devices: 1, checkpoint: all}"]
    again = train(configured(*GROWTH, *recomputed))
    one, other = (latest(run.folder.path) for run in (grown[0], again))
    torch.testing.assert_close(one.model, other.model, rtol=1e-3, atol=1e-5)  # float32, in another order of sums
    with pytest.raises(ConfigError, match="parallel divides volumes or layers"):
        configured(*GROWTH, *recomputed).with_mesh(configured("parallel.strategy=spatial").mesh(2))


def test_a_growing_training_without_memory_goes_on_recomputed(configured, monkeypatch):
    config = configured(*GROWTH, "parallel.on_oom=replan")
    memory = MemoryUse(used=0, reserved=2**30, outside=0, peak_in="backward")
    known = Estimate(candidate=Candidate(checkpoint="all"), memory=memory, seconds=1.0)  # as of a GPU
    monkeypatch.setattr(replanning, "_forecast", lambda *of, more_gpus: Answer(forecasts=(known,)))

    class Full(Hook):
        def on_batch_begin(self, training, batch):
            if training.epoch == 3 and not isinstance(training.network, ModelParallel):
                torch.empty(1 << 50, dtype=torch.uint8)

    watch = Watch()
    outcome = train(config, hooks=[Full(), watch])
    assert len(outcome.history) == 4
    assert watch.seen[-3:] == [(3, (16, 16, 16))] * 3
    record = json.loads((config.folder / "replanned.json").read_text(encoding="utf-8"))
    assert "parallel.checkpoint=all" in record["overrides"]


def test_memory_is_read_on_patches_of_the_size_that_is_forecast(grown):
    outcome, _ = grown
    patch = load_config(outcome.folder.path / "config.yaml").patch
    assert [patch.first_whole(epochs) for epochs in (1, 4)] == [1, 3]

    class Meter:
        begun, read_at = 0, ()

        def begin(self):
            self.begun += 1

        def read(self):
            self.read_at = (*self.read_at, (training.epoch, training.position))
            return []

    meter = Meter()
    hook = FirstSteps(meter, first_epoch=3)
    training = SimpleNamespace(epoch=1, position=0, accumulate=1, num_batches=3, is_main_process=True)
    hook.on_training_begin(training)
    for training.epoch in range(1, 5):
        training.position = 0
        hook.on_epoch_begin(training)
        for training.position in range(1, 4):
            hook.on_batch_end(training, {})
    assert meter.begun == 2  # at first, and where the patches are whole
    assert {epoch for epoch, _ in meter.read_at} == {3}


def test_what_was_recorded_of_a_size_is_freed_with_it(grown):
    _, watch = grown
    assert watch.released == [2, 3, 4]  # where the size changes, and at the end


def test_a_training_that_goes_on_amid_its_growth_ends_in_the_same_bits(grown, configured):
    """Interrupted where the size changes, and in the epoch after."""
    whole, _ = grown
    config = configured(*GROWTH)
    for stop_at in ((1, 3), (2, 1)):
        with pytest.raises(KeyboardInterrupt):
            train(config, resume=config.folder.exists(), hooks=[At(*stop_at, press_ctrl_c)])
        assert latest(config.folder).progress == stop_at
    again = train(config, resume=True)
    one, other = latest(whole.folder.path), latest(config.folder)
    torch.testing.assert_close(other.model, one.model, rtol=0, atol=0)
    torch.testing.assert_close(other.average["average"], one.average["average"], rtol=0, atol=0)
    assert [record.losses for record in again.history] == [record.losses for record in whole.history]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["patch.growth=[{until: 0.5, size: [8, 8, 32]}]"], r"no side larger than in the next part or in patch\.size"),
        (
            ["patch.growth=[{until: 0.5, size: [8, 8, 8]}, {until: 0.5, size: [8, 8, 16]}]"],
            "with increasing until and no side larger",
        ),
        (["patch.growth=[{until: 1.0, size: [8, 8, 8]}]"], "less than 1"),
        (["patch.growth=[{until: 0.5, size: [8, 8, 8]}]", "parallel.strategy=spatial"], "parallel divides volumes"),
        (["patch.growth=[{until: 0.5, size: [8, 8, 8]}]", "parallel.pipeline=2"], "parallel divides volumes or layers"),
        (["training.validate_every=null", "training.patience=3"], r"training\.patience needs validations, but"),
    ],
)
def test_what_cannot_be_meant_is_refused(configured, overrides, message):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_no_epoch_is_validated_where_none_is_to_be(configured):
    outcome = train(configured("training.validate_every=null", "training.epochs=1"))
    assert [record.score for record in outcome.history] == [None]
    assert outcome.validated is not None
    assert not (outcome.folder.checkpoints / "best.pt").exists()
