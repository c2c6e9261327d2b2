"""What a training leaves of itself while it runs, when it fails, and when it goes on."""

import math

import pytest

from volseg import Hook, experiment
from volseg.experiment import RunFolder
from volseg.monitoring.heartbeat import Heartbeat
from volseg.monitoring.run_files import read_times
from volseg.parallel.processes.progress import report_progress


class Stop(Hook):
    """Raises what it is given at the end of the first epoch's validation, and keeps what others could read then."""

    def __init__(self, folder, fault):
        self.folder, self.fault, self.seen = folder, fault, []

    def on_validation_begin(self, training):
        self.seen.append(self.folder.status())

    def on_epoch_end(self, training, record):
        self.seen.append(self.folder.status())
        raise self.fault


def test_a_run_says_how_far_it_is_how_it_failed_and_how_it_went_on(configured):
    config = configured()
    folder = RunFolder(config.folder)
    hook = Stop(folder, RuntimeError("the disk is on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        experiment.train(config, hooks=[hook])
    begun, validated = hook.seen
    assert (begun.state, begun.epoch, begun.batch) == ("validating", 0, 3)
    assert (validated.state, validated.epoch, validated.epochs, validated.batches) == ("training", 1, 2, 3)
    assert validated.loss is not None
    assert validated.score is not None
    failed = folder.status()
    assert (failed.state, failed.message) == ("failed", "RuntimeError: the disk is on fire")
    assert [line.epoch for line in folder.history()] == [1]

    experiment.train(config, resume=True)
    assert folder.status().state == "finished"
    # The checkpoint is from before the fault, so the first epoch came twice, and stands there once.
    assert [(line.epoch, line.step) for line in folder.history()] == [(1, 3), (2, 6)]
    first, second = folder.times()
    assert first.begun < second.begun
    for part in (first, second):
        assert {"start", "reading", "preparing", "building", "training", "waiting for data"} <= {*part.spans}
        assert all(seconds >= 0 for seconds in part.spans.values())
        assert math.fsum(part.spans.values()) == pytest.approx(part.seconds), "a second is counted twice, or not at all"
    assert {"final validation", "writing"} <= {*second.spans}
    assert "final validation" not in first.spans


def test_a_run_that_is_interrupted_says_so(configured):
    config = configured()
    with pytest.raises(KeyboardInterrupt):
        experiment.train(config, hooks=[Stop(RunFolder(config.folder), KeyboardInterrupt())])
    assert RunFolder(config.folder).status().state == "interrupted"


def test_the_thread_writes_when_the_work_goes_on_and_is_silent_when_it_hangs(tmp_path):
    folder = RunFolder(tmp_path)
    signs = Heartbeat(every_seconds=0.001)
    with signs.writing(tmp_path):
        report_progress("read", item="case_7")
        while folder.status().message != "read, case_7":  # the thread's next look
            pass
        before = folder.status_file.stat().st_mtime_ns
        looks = Heartbeat(every_seconds=0.001)
        with looks.writing(tmp_path / "another"):  # its thread looks as often meanwhile, and sees nothing new
            pass
        assert folder.status_file.stat().st_mtime_ns == before
    assert folder.status().state == "finished"


class BreakOff(Hook):
    """Fail after a batch of the second epoch, behind a checkpoint in the middle of it."""

    def on_batch_end(self, training, fields):
        if (training.epoch, training.position) == (1, 2):
            self.state = training.state()
            raise RuntimeError("something of the user's")


def test_an_epoch_that_breaks_off_has_the_seconds_in_which_it_waited(configured):
    config, broken = configured(), BreakOff()
    with pytest.raises(RuntimeError, match="something of the user's"):
        experiment.train(config, hooks=[broken])
    (part,) = read_times(config.folder / "times.json")
    assert min(part.spans.values()) >= 0  # there was less than no training
    assert math.fsum(part.spans.values()) == pytest.approx(part.seconds)
    seconds, waited = broken.state.seconds
    assert seconds > waited > 0  # a run that went on from here had waited longer than it took
