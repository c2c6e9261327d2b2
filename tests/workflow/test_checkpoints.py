"""Nothing is lost, and a resumed training ends like the uninterrupted one."""

import resource
import shutil
from dataclasses import replace

import pytest
import torch
from training_hooks import StopAfter

from tests.workflow.conftest import assert_equal
from volseg.checkpointing.file import BEST, LATEST
from volseg.errors import CheckpointError
from volseg.workflow import Checkpoints, EpochRecord, Hook, TrainingState, load_checkpoint, save_checkpoint

RECORD = EpochRecord(epoch=0, losses={"loss": 0.5}, learning_rate=0.1, seconds=2.0, seconds_waited=1.0, score=0.25)
STATE = TrainingState(
    model={"weight": torch.ones(10)},
    optimizer={"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    steps_done=6,
    scaler={},
    average={"updates": 6, "average": {"weight": torch.zeros(10)}},
    random={"torch": torch.get_rng_state()},
    epoch=1,
    position=2,
    losses=({"loss": torch.tensor(0.5)},),
    cases=(("case_1", "case_2"), ("case_3",)),
    seconds=(1.5, 0.5),
    history=(RECORD,),
    best=RECORD,
    metadata={"config": {"name": "x"}},
)


def with_weight(weight):
    return replace(STATE, model={"weight": weight})


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, before):
    path = tmp_path / LATEST
    if before:
        save_checkpoint(STATE, path)
    said = "the previous one is still" if before else "no earlier one exists"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write beyond this fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match=rf"latest\.pt could not be written .*{said}"):
            save_checkpoint(with_weight(torch.randn(100_000)), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == [LATEST] * before
    if before:
        torch.testing.assert_close(load_checkpoint(path).model["weight"], torch.ones(10))


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"format": 1, "model": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(
        CheckpointError, match=r"bad\.pt contains more than tensors, .*run arbitrary code \(GLOBAL .*print\)"
    ):
        load_checkpoint(tmp_path / "bad.pt")


def test_absent_truncated_and_foreign_checkpoints_say_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*none\.pt; train first"):
        load_checkpoint(tmp_path / "none.pt")
    whole = save_checkpoint(with_weight(torch.ones(1000)), tmp_path / "whole.pt").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PK\x03\x04", b"\x80\x02", b"cbuiltins\neval\n"):
        (tmp_path / "half.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"half\.pt"):
            load_checkpoint(tmp_path / "half.pt")
    for foreign in (torch.ones(1), {"format": "new"}):
        torch.save(foreign, tmp_path / "foreign.pt")
        with pytest.raises(CheckpointError, match=r"foreign\.pt is not a volseg checkpoint"):
            load_checkpoint(tmp_path / "foreign.pt")


def test_a_checkpoint_of_another_network_is_refused(make_training):
    state = make_training().state_dict()
    state["model"]["layers.0.weight"] = torch.zeros(9, 1, 3, 3, 3)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit this network and optimizer.*layers\.0\.weight"):
        make_training().load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"training\.ema"):
        make_training(average_decay=0.9).load_state_dict(make_training().state_dict())


@pytest.mark.parametrize("checkpoints_first", [True, False])
def test_latest_and_best_are_written_with_the_metadata_whoever_stops_the_training(
    make_training, tmp_path, checkpoints_first
):
    class Validation:
        score, scores = 0.5, {}

        def __call__(self):
            return self

    class Remove(Hook):
        def on_epoch_begin(self, training):
            shutil.rmtree(tmp_path / "removed", ignore_errors=True)

    folder = tmp_path / "checkpoints"
    hooks = [Checkpoints(folder, every_minutes=60, metadata=lambda: {"config": {"name": "x"}}), StopAfter(2)]
    hooks = hooks if checkpoints_first else hooks[::-1]
    make_training(validation=Validation(), epochs=5, hooks=hooks).run()
    assert load_checkpoint(folder / BEST).epoch == 1
    latest = load_checkpoint(folder / LATEST)
    assert (latest.epoch, latest.metadata) == (2, {"config": {"name": "x"}})
    make_training(epochs=3, hooks=[Checkpoints(tmp_path / "removed"), Remove()]).run()
    assert (tmp_path / "removed" / LATEST).is_file()


def test_a_training_that_begins_leaves_the_checkpoints_of_an_earlier_one(make_training, tmp_path):
    make_training(epochs=1, hooks=[Checkpoints(tmp_path)]).run()
    written = (tmp_path / LATEST).read_bytes()
    with pytest.raises(
        CheckpointError, match=r"contains latest\.pt of an earlier training.*load_checkpoint\('.*latest\.pt'"
    ):
        make_training(epochs=2, hooks=[Checkpoints(tmp_path)]).run()
    assert (tmp_path / LATEST).read_bytes() == written
    resumed = make_training(epochs=2, hooks=[Checkpoints(tmp_path)])
    resumed.load_state_dict(load_checkpoint(tmp_path / LATEST))
    assert len(resumed.run()) == 2
    assert load_checkpoint(tmp_path / LATEST).epoch == 2


def test_a_state_is_read_as_it_was_written(tmp_path):
    read = load_checkpoint(save_checkpoint(STATE, tmp_path / LATEST))
    assert_equal(read.as_checkpoint(), STATE.as_checkpoint())
    assert (read.history, read.best, read.seconds) == (STATE.history, STATE.best, STATE.seconds)
    assert read.progress == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=1), "has format 1, not 2"),
        (lambda c: c.update(format=99), "has format 99, not 2; use the volseg that wrote it"),
        (lambda c: c.pop("epoch"), r"missing keys \['epoch'\], unknown keys none"),
        (lambda c: c.update(extra=1), r"missing keys none, unknown keys \['extra'\]"),
        (lambda c: c.update(epoch="one"), r"an invalid training state: epoch: .*integer, got str"),
        (lambda c: c.update(position=-1), r"an invalid training state: position: .*greater"),
        (lambda c: c.update(history=[{"epochs": 1}]), r"an invalid training state: history\.0\.epoch: Field required"),
        (lambda c: c.update(seconds=3), r"an invalid training state"),
    ],
)
def test_another_format_and_what_is_missing_surplus_or_of_another_kind_are_told_with_the_file(
    tmp_path, change, message
):
    content = {"format": 2, **STATE.as_checkpoint()}
    change(content)
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(CheckpointError, match=rf"odd\.pt .*{message}"):
        load_checkpoint(tmp_path / "odd.pt")


def test_a_folder_that_is_taken_away_while_it_is_written_to_is_not_made_again(make_training, tmp_path):
    """The thread created the moved folder again, with a checkpoint in it."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    asked = []

    def require():
        asked.append(run.is_dir())
        if len(asked) == 2:
            run.rename(moved)
        elif len(asked) > 2:
            raise CheckpointError("the folder was taken away")

    checkpoints = Checkpoints(run / "checkpoints", every_minutes=0, require_folder=require)
    with pytest.raises(CheckpointError, match="the folder was taken away"):
        make_training(hooks=[checkpoints]).run()
    assert not run.exists()
    assert (moved / "checkpoints" / "latest.pt").is_file()
