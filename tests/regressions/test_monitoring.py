"""What was silently wrong in what a training tells of itself, each found by an attack."""

import errno
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_trainings import plain_training
from torch import nn
from torch.nn import functional

from volseg.checkpointing.state import EpochRecord
from volseg.errors import ConfigError
from volseg.monitoring import heartbeat
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.loggers import History, LoggedRun, Logger, TensorBoard
from volseg.monitoring.run_files import RunPart, read_history, read_status, write_status, write_times
from volseg.monitoring.training_log import TrainingLog, list_scalars
from volseg.reporting import write_report
from volseg.workflow.named import Objective
from volseg.workflow.validation import Example

RECORD = EpochRecord(epoch=0, losses={"loss": 0.5}, learning_rate=0.1, seconds=5.0, seconds_waited=1.0)


class Ended(Logger):
    """Keeps what it was told at the end, and breaks what it is given."""

    scores = None

    def scalars(self, values, step):
        dict.clear(values)

    def end(self, scores):
        self.scores = dict(scores)


@pytest.mark.parametrize("kind", [History, TensorBoard])
def test_a_logger_of_a_second_training_leaves_the_files_of_the_first(kind, tmp_path):
    one = kind()
    for name in ("first", "second"):
        run = LoggedRun(name=name, folder=tmp_path / name)
        plain_training(epochs=2, hooks=TrainingLog([one], run)).run()
    written = {name: [file for file in (tmp_path / name).rglob("*") if file.is_file()] for name in ("first", "second")}
    # TensorBoard counts batches in a file of its own.
    assert all(len(files) == 1 + (kind is TensorBoard) for files in written.values())
    if kind is History:
        assert [line.epoch for line in read_history(tmp_path / "first/history.jsonl")] == [1, 2]


def test_what_a_logger_does_to_its_numbers_reaches_no_other_one(tmp_path):
    log = TrainingLog([Ended(), History(tmp_path / "history.jsonl")])
    plain_training(epochs=2, hooks=log).run()
    assert all("train/loss" in line.scalars for line in read_history(tmp_path / "history.jsonl"))


def test_numbers_of_numpy_do_not_end_the_history(tmp_path):
    record = replace(RECORD, score=np.float32(0.5), scores={"own/metric": np.float32(0.25)})
    assert list_scalars(record)["val/own/metric"] == 0.25
    history = History(tmp_path / "history.jsonl")
    history.begin(LoggedRun(name="a"))
    history.scalars(list_scalars(record), 1)
    history.end({})
    assert read_history(tmp_path / "history.jsonl")[0].scalars["val/dice_mean"] == 0.5


def test_a_training_that_ends_is_no_killed_one_to_its_loggers():
    whole, cut_off = Ended(), Ended()
    history = plain_training(epochs=2, hooks=TrainingLog([whole])).run()
    assert whole.scores == {"final/loss": history[-1].losses["loss"]}

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain_training(epochs=2, validation=interrupt, hooks=TrainingLog([cut_off])).run()
    assert cut_off.scores == {}


def test_a_case_that_cannot_be_drawn_ends_no_training(caplog):
    class Validation:
        volume = torch.zeros(4, 4, 4)
        examples = (
            Example(case="odd", image=volume, label=volume, prediction=volume, affine=torch.full((4, 4), torch.nan)),
        )

        def __call__(self):
            return SimpleNamespace(score=0.5, scores={})

    assert len(plain_training(epochs=2, validation=Validation(), hooks=TrainingLog([Ended()])).run()) == 2
    assert "no picture of odd" in caplog.text


def test_the_heartbeat_comes_back_when_a_full_disk_has_space_again(tmp_path, monkeypatch, caplog):
    def refuse(file, status):
        raise OSError(errno.ENOSPC, "No space left on device")

    signs = Heartbeat(every_seconds=3600)
    with caplog.at_level(logging.WARNING), signs.writing(tmp_path):
        monkeypatch.setattr(heartbeat.run_files, "write_status", refuse)
        signs.on_training_begin(plain_training())
        signs.on_validation_begin(plain_training())
        assert read_status(tmp_path / "status.json").state == "preparing"
        monkeypatch.setattr(heartbeat.run_files, "write_status", write_status)
    assert read_status(tmp_path / "status.json").state == "finished"
    assert caplog.text.count("No space left") == 1


def test_a_clock_that_was_set_back_makes_no_other_run(tmp_path):
    parts = [RunPart(begun=begun, seconds=1.0) for begun in (2000.0, 1000.0)]
    write_times(tmp_path / "times.json", parts)
    signs = Heartbeat(every_seconds=3600)
    with signs.writing(tmp_path):
        assert signs.begun == 2000.0


def test_a_loss_whose_parameters_are_the_fields_in_another_order_is_refused():
    def exchanged(label, logits):
        return functional.cross_entropy(logits, label)

    class Late(nn.Module):
        def forward(self, logits, mask=None, label=None):
            return logits.mean() if label is None else logits.sum()

    for loss in (exchanged, Late()):
        with pytest.raises(ConfigError, match=r"called with logits, label in this order"):
            Objective(loss)
    Objective(functional.cross_entropy)


@pytest.mark.parametrize(
    "name", ["task.json", "environment.json", "told.json", "memory.json", "replanned.json", "postprocessing.json"]
)
def test_a_report_is_written_of_a_folder_whose_file_holds_something_else(name, tmp_path):
    (tmp_path / "config.yaml").write_text("name: a\n", encoding="utf-8")
    (tmp_path / name).write_text(json.dumps(["something", "else"]), encoding="utf-8")
    assert write_report(tmp_path).is_file()


def test_a_report_draws_a_training_that_blew_up(tmp_path):
    (tmp_path / "config.yaml").write_text("name: a\n", encoding="utf-8")
    lines = [
        {"epoch": epoch, "step": epoch, "time": 1.0, "scalars": {"train/loss": loss}}
        for epoch, loss in enumerate((-1e308, 1e308))
    ]
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert "<svg" in write_report(tmp_path).read_text(encoding="utf-8")
