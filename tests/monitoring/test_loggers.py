"""Loggers: the numbers they receive, the effect of their faults, and the real ones of other packages."""

import logging
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from volseg.checkpointing.state import EpochRecord
from volseg.errors import ConfigError
from volseg.monitoring.environment import environment
from volseg.monitoring.loggers import LOGGERS, History, LoggedRun, Logger, TensorBoard, build_logger
from volseg.monitoring.run_files import read_history
from volseg.monitoring.training_log import TrainingLog, list_scalars, read_progress

# TensorBoard's reader still asks NumPy for old names.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CONFIG = {"name": "a", "optimizer": {"name": "SGD", "lr": 0.1}, "losses": [{"name": "DiceCELoss"}]}


class FinishedTraining:
    """The attributes of a training that the hook reads."""

    is_main_process, epoch, validation, num_batches, finished, history = True, 0, None, 10, True, ()


def make_record(epoch):
    return EpochRecord(
        epoch=epoch,
        losses={"loss": 0.5, "dice": 0.25},
        learning_rate=0.1,
        seconds=5.0,
        seconds_waited=1.0,
        score=0.75,
        scores={"dice/Anterior": 0.75, "hd95/Anterior": math.nan},
        batches=10,
        seconds_validating=2.0,
        voxels_per_second=1e6,
        gradient_norm=3.0,
    )


def test_the_time_left_counts_the_validation_of_every_tenth_epoch():
    """It fell by half where none of the last five epochs was validated; past the last epoch it was negative."""
    told, known = make_record(0), {"epochs": 100, "num_batches": 10, "latest_losses": {}, "best": None}
    for epoch, position, left in ((20, 5, 79.5 * 15), (25, 0, 75 * 13), (99, 15, 0)):
        history = [replace(told, seconds_validating=100.0 * (number % 10 == 9)) for number in range(epoch)]
        state = SimpleNamespace(history=history, epoch=epoch, position=position, **known)
        assert read_progress(state)["seconds_left"] == left


class Heard(Logger):
    def __init__(self):
        self.events = []

    def begin(self, run):
        self.events.append(("begin", run.name, run.epoch, run.batches))

    def scalars(self, values, step):
        self.events.append(("scalars", step, dict(values)))

    def text(self, name, text):
        self.events.append(("text", name, text))

    def end(self, scores):
        self.events.append(("end", dict(scores)))


def log_two_epochs(*loggers, **settings):
    log = TrainingLog(loggers, settings.pop("run", LoggedRun(name="a", config=CONFIG)), ends=False, **settings)
    log.on_training_begin(FinishedTraining())
    for epoch in range(2):
        log.on_epoch_end(FinishedTraining(), make_record(epoch))
    log.on_training_end(FinishedTraining())
    log.end({"final/dice_mean": 0.8})
    return log


def test_a_logger_hears_of_a_training_from_its_begin_to_its_final_scores():
    heard = Heard()
    log_two_epochs(heard, texts={"network": "a table"})
    names = [event[0] for event in heard.events]
    assert names == ["begin", "text", "scalars", "scalars", "end"]
    assert heard.events[0] == ("begin", "a", 0, 10)
    values = heard.events[2][2]
    assert values["train/loss"] == 0.5
    assert values["train/gradient_norm"] == 3.0
    assert values["val/dice/Anterior"] == 0.75
    # What a step takes, apart: on its batch, on waiting for it, and its part of the validation.
    steps = [values[f"time/step_{part}seconds"] for part in ("", "data_wait_", "validation_")]
    assert steps == pytest.approx([0.4, 0.1, 0.2])
    assert heard.events[-1] == ("end", {"final/dice_mean": 0.8})


def test_tensorboard_and_the_history_have_the_same_numbers(tmp_path):
    log_two_epochs(TensorBoard(tmp_path / "tensorboard"), History(tmp_path / "history.jsonl"))
    lines = read_history(tmp_path / "history.jsonl")
    assert [(line.epoch, line.step) for line in lines] == [(1, 10), (2, 20)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {*events.Tags()["scalars"]} == {*lines[0].scalars, "final/dice_mean"}
    plain = list_scalars(replace(make_record(0), score=None, scores={}))
    tags = {"val/dice_mean", "val/dice/Anterior", "val/hd95/Anterior", "time/validation_seconds"}
    assert (
        {*lines[0].scalars} - tags == {*plain} >= {"train/loss", "lr", "time/epoch_seconds", "time/data_wait_seconds"}
    )
    for tag, value in lines[1].scalars.items():
        assert [event.step for event in events.Scalars(tag)] == [1, 2]
        assert events.Scalars(tag)[1].value == pytest.approx(value, nan_ok=True)
    assert [event.step for event in events.Scalars("final/dice_mean")] == [2]


def test_the_tab_of_hyper_parameters_has_every_setting_and_says_when_the_training_ended(tmp_path):
    log_two_epochs(TensorBoard(tmp_path), texts={"config": "name: a"})
    events = EventAccumulator(str(tmp_path)).Reload()
    told = events.summary_metadata
    begun = plugin_data_pb2.HParamsPluginData.FromString(
        told["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info.hparams
    assert begun["optimizer.lr"].number_value == 0.1
    assert begun["losses.0.name"].string_value == "DiceCELoss"
    ended = plugin_data_pb2.HParamsPluginData.FromString(told["_hparams_/session_end_info"].plugin_data.content)
    assert ended.session_end_info.status  # finished
    shown = plugin_data_pb2.HParamsPluginData.FromString(told["_hparams_/experiment"].plugin_data.content).experiment
    assert {info.name.tag for info in shown.metric_infos} == {"final/dice_mean", "val/dice_mean", "train/loss"}
    assert "config/text_summary" in told


def test_tensorboard_has_the_patches_of_the_first_batch(tmp_path):
    training = FinishedTraining()
    log = TrainingLog([TensorBoard(tmp_path)], ends=False)
    log.on_training_begin(training)
    label = torch.zeros(2, 1, 8, 8, 8).long().index_fill(2, torch.tensor([3, 4]), 1)
    for _ in range(3):
        log.on_batch_begin(training, {"image": torch.rand(2, 1, 8, 8, 8), "label": label})
    log.end()
    events = EventAccumulator(str(tmp_path)).Reload()
    (image,) = events.Images("train/patches")
    assert image.step == 0
    assert image.height > 2 * 256  # two samples


def test_a_training_that_goes_on_replaces_the_events_past_its_checkpoint(tmp_path):
    for begin, epochs in ((0, (0, 1, 2)), (1, (1,))):
        training = FinishedTraining()
        training.epoch = begin
        hook = TrainingLog([TensorBoard(tmp_path)])
        hook.on_training_begin(training)
        for epoch in epochs:
            hook.on_epoch_end(training, replace(make_record(epoch), score=0.1 * begin))
        hook.on_training_end(training)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("val/dice_mean")] == [(1, 0.0), (2, 0.1)]


def test_a_full_disk_ends_no_training_and_is_said_once(tmp_path, caplog):
    """The thread of torch's writer printed a traceback, and the training met the fault later."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder], check=False, capture_output=True
    ).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        hook = TrainingLog([TensorBoard(folder)])
        hook.on_training_begin(FinishedTraining())
        for epoch in range(100):
            hook.on_epoch_end(FinishedTraining(), make_record(epoch))
        hook.on_training_end(FinishedTraining())
        log_two_epochs(TensorBoard(folder / "another"))
    finally:
        subprocess.run(["umount", folder], check=True)
    told = [line for line in caplog.messages if "logging by TensorBoard" in line]
    assert len(told) == 2
    assert "No space left on device); the training continues" in told[0]
    assert "another" in told[1]


@pytest.mark.parametrize("ends", [True, False])
def test_a_logger_that_fails_is_said_and_ended_once_and_ends_no_training(caplog, ends):
    """It is ended, as it may hold a server's run."""

    class Failing(Heard):
        def scalars(self, values, step):
            raise RuntimeError("the server is gone")

        def end(self, scores):
            super().end(scores)
            if not ends:
                raise OSError("still gone")

        def __str__(self):
            return "a logger"

    failing, heard = Failing(), Heard()
    log_two_epochs(failing, heard)
    assert failing.events == [("begin", "a", 0, 10), ("end", {})]
    assert [event[0] for event in heard.events] == ["begin", "scalars", "scalars", "end"]
    more = "" if ends else ", and its end() failed: OSError: still gone"
    told = f"stopped after an error (RuntimeError: the server is gone{more}); the training continues"
    assert caplog.messages == [f"logging by a logger {told}"]


def test_a_logger_that_cannot_begin_ends_the_training_before_its_first_batch():
    class Failing(Heard):
        def begin(self, run):
            raise ConfigError("no such server")

    first, failing, last = Heard(), Failing(), Heard()
    with pytest.raises(ConfigError, match="no such server"):
        log_two_epochs(first, failing, last)
    assert [event[0] for event in first.events] == ["begin", "end"]  # nobody else would end it
    assert failing.events == last.events == []


def test_one_logger_is_enough_and_what_is_none_is_refused_at_once():
    heard = Heard()
    TrainingLog(heard).on_training_begin(FinishedTraining())
    assert heard.events[0][0] == "begin"
    for wrong in ("tensorboard", TensorBoard, 3):
        with pytest.raises(ConfigError, match=r"loggers must derive from volseg\.monitoring\.loggers\.Logger, got "):
            TrainingLog([wrong])
    LOGGERS.register("none", dict)
    try:
        with pytest.raises(ConfigError, match=r"logger none must be a volseg\.monitoring\.loggers\.Logger, got a dict"):
            build_logger({"name": "none"})
    finally:
        LOGGERS.forget("none")


def test_a_process_that_does_not_lead_tells_nobody():
    heard, training = Heard(), FinishedTraining()
    training.is_main_process = False
    log = TrainingLog([heard])
    log.on_training_begin(training)
    log.on_epoch_end(training, make_record(0))
    log.on_training_end(training)
    assert heard.events == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_there_is_named_with_what_installs_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"logger {name} needs a package .* pip install {name}$"):
        build_logger({"name": name})


@pytest.mark.filterwarnings("ignore")  # theirs
def test_weights_and_biases_keeps_a_run_offline(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    logger = build_logger({"name": "wandb", "mode": "offline"})
    log_two_epochs(logger, run=LoggedRun(name="a", folder=tmp_path, config=CONFIG), texts={"network": "a table"})
    written = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 1
    content = written[0].read_bytes()
    for part in (b"train/gradient_norm", b"final/dice_mean", b"text/network", b"DiceCELoss"):
        assert part in content


@pytest.mark.filterwarnings("ignore")  # theirs
def test_mlflow_keeps_a_run_and_goes_on_with_it(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else a folder is refused for new runs
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    uri = f"file:{tmp_path / 'store'}"
    run = LoggedRun(name="a", id="a-1", folder=tmp_path, config=CONFIG)
    for _ in range(2):  # the second one goes on
        logger = build_logger({"name": "mlflow", "uri": uri})
        log = TrainingLog([logger], run, texts={"network": "a table"}, ends=False)
        log.on_training_begin(FinishedTraining())
        log.on_epoch_end(FinishedTraining(), make_record(0))
        log.end({"final/dice_mean": 0.8})
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("volseg").experiment_id])
    assert found.data.metrics["final/dice_mean"] == 0.8
    assert found.data.metrics["train/gradient_norm"] == 3.0
    assert "val/hd95/Anterior" not in found.data.metrics  # NaN
    assert found.data.params["optimizer.lr"] == "0.1"
    assert found.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(found.info.run_id)} >= {"network.md"}


def test_the_environment_names_versions_and_devices():
    found = environment()
    assert found["libraries"]["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
