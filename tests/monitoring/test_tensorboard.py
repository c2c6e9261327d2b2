import subprocess

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from volseg.checkpointing.state import EpochRecord
from volseg.monitoring.environment import environment
from volseg.monitoring.loggers import TensorBoard
from volseg.monitoring.training_log import TrainingLog


class FinishedTraining:
    """What the hook reads of a training."""

    is_main_process, epoch, validation, num_batches, finished, history = True, 0, None, 10, True, ()


def record(epoch, score=None):
    return EpochRecord(
        epoch=epoch,
        losses={"loss": 1.0 / (epoch + 1)},
        learning_rate=0.1,
        seconds=2.0,
        seconds_waited=0.5,
        score=score,
        scores={"dice/Anterior": score} if score else {},
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's reader still asks NumPy for old names
def test_the_event_file_holds_loss_rate_dice_and_waiting(tmp_path):
    hook = TrainingLog([TensorBoard(tmp_path)])
    hook.on_training_begin(FinishedTraining())
    hook.on_epoch_end(FinishedTraining(), record(0))
    hook.on_epoch_end(FinishedTraining(), record(1, score=0.5))
    hook.on_training_end(FinishedTraining())
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = {"train/loss", "lr", "time/epoch_seconds", "time/data_wait_seconds", "time/validation_seconds"}
    assert set(events.Tags()["scalars"]) == {*tags, "val/dice_mean", "val/dice/Anterior"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("val/dice/Anterior")] == [(2, 0.5)]


def test_the_environment_names_versions_and_devices():
    found = environment()
    assert found["libraries"]["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()


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
            hook.on_epoch_end(FinishedTraining(), record(epoch, score=0.5))
        hook.on_training_end(FinishedTraining())
        hook = TrainingLog([TensorBoard(folder / "another")])
        hook.on_training_begin(FinishedTraining())
        hook.on_epoch_end(FinishedTraining(), record(0))
        hook.on_training_end(FinishedTraining())
    finally:
        subprocess.run(["umount", folder], check=True)
    told = [line for line in caplog.messages if "no more is logged by TensorBoard" in line]
    assert len(told) == 2
    assert "No space left on device); the training goes on" in told[0]
    assert "another" in told[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's reader still asks NumPy for old names
def test_a_training_that_goes_on_replaces_the_events_past_its_checkpoint(tmp_path):
    for begin, epochs in ((0, (0, 1, 2)), (1, (1,))):
        training = FinishedTraining()
        training.epoch = begin
        hook = TrainingLog([TensorBoard(tmp_path)])
        hook.on_training_begin(training)
        for epoch in epochs:
            hook.on_epoch_end(training, record(epoch, score=0.1 * begin))
        hook.on_training_end(training)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("val/dice_mean")] == [(1, 0.0), (2, 0.1)]
