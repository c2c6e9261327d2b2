"""What the first steps of a training took, beside a forecast that may come late, or never."""

import json

import pytest
import torch
from in_group import in_group
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.nn import functional

from volseg import Named, Training
from volseg.forecast.memory_use import MemoryUse
from volseg.monitoring.memory import DeviceMemory, FirstSteps, GpuMeter, MemoryForecast
from volseg.monitoring.tensorboard import TensorBoard
from volseg.monitoring.training_log import TrainingLog
from volseg.parallel.devices import find_rank
from volseg.parallel.processes.group import start_group

GIB = 2**30


class Meter:
    """A device that has a GiB more at each reading."""

    def __init__(self, process=0):
        self.process, self.readings = process, 0

    def begin(self):
        self.readings = 0

    def read(self):
        self.readings += 1
        reserved = (10 * self.readings + self.process) * GIB
        return [DeviceMemory(device="cuda:0", used=reserved // 2, reserved=reserved, process=self.process)]


class Asked:
    """A forecast that comes when it has been asked for so often."""

    def __init__(self, forecast, after=0):
        self.forecast, self.after, self.closed, self.begun = forecast, after, False, 0

    def begin(self):
        self.begun += 1

    def poll(self):
        if not self.begun:
            return None
        self.after -= 1
        return self.forecast if self.after < 0 else None

    def close(self):
        self.closed = True


def forecast(reserved):
    return MemoryForecast(memory=MemoryUse(used=reserved // 2, reserved=reserved, outside=0, peak_in="backward"))


def train(*hooks, batches=12, epochs=1, accumulate=1):
    net = torch.nn.Conv3d(1, 2, 1)
    made = [{"image": torch.ones(1, 1, 2, 2, 2), "label": torch.zeros(1, 2, 2, 2).long()}] * batches
    training = Training(
        Named(net, ["image"], ["logits"]),
        Named(functional.cross_entropy, ["logits", "label"], ["loss"]),
        torch.optim.SGD(net.parameters(), lr=0.1),
        made,
        epochs=epochs,
        accumulate=accumulate,
        hooks=hooks,
    )
    training.run()


def steps_read(hook):
    return [reading.steps for reading in hook.readings]


@pytest.mark.parametrize(
    ("batches", "epochs", "accumulate", "steps"),
    [(12, 1, 1, [2, 8]), (12, 2, 3, [2, 4]), (3, 2, 1, [2, 3]), (1, 1, 1, [1])],
)
def test_the_first_steps_and_those_after_a_recording_are_read(batches, epochs, accumulate, steps):
    hook = FirstSteps(Meter())
    train(hook, batches=batches, epochs=epochs, accumulate=accumulate)
    assert steps_read(hook) == steps


def test_one_line_and_the_record_say_how_far_the_forecast_is(caplog):
    written = []
    asked = Asked(forecast(20 * GIB))
    hook = FirstSteps(Meter(), asked, beside=4 * GIB, write=written.append)
    with caplog.at_level("INFO"):
        train(hook)
    words = (
        "memory after 8 steps: 20.00 GiB reserved and 10.00 GiB used of cuda:0 of process 0, the fullest of 1, of it "
        "4.00 GiB cases; forecast of a step: 20.00 GiB reserved and 10.00 GiB used (+25.0%)"
    )
    assert words in caplog.text
    last = json.loads(json.dumps(written[-1]))
    assert [reading["steps"] for reading in last["measured"]] == [2, 8]
    assert last["error"] == pytest.approx(0.25)
    assert last["forecast"]["peak_in"] == "backward"
    assert asked.closed


def test_what_was_forecast_of_each_gpu_is_told_beside_what_it_took():
    of_each = tuple(MemoryUse(used=gib * GIB, reserved=2 * gib * GIB, outside=0, peak_in="") for gib in (4, 3))
    asked = Asked(MemoryForecast(memory=of_each[0], devices=of_each))
    hook = FirstSteps(Meter(), asked)
    train(hook)
    shown = hook.scalars()
    assert (shown["gpu/0/forecast_gib"], shown["gpu/1/forecast_gib"]) == (8.0, 6.0)
    assert [device["reserved"] for device in hook.as_json()["forecast_of_devices"]] == [8 * GIB, 6 * GIB]


def test_a_forecast_that_comes_late_is_told_then(caplog):
    hook = FirstSteps(Meter(), Asked(forecast(20 * GIB), after=2))
    with caplog.at_level("INFO"):
        train(hook, epochs=2)
    assert caplog.text.count("forecast of a step: 20.00 GiB") == 1
    assert hook.find_error() == pytest.approx(0.0)


@pytest.mark.parametrize(("batches", "begun"), [(7, 0), (8, 1), (20, 1)])
def test_a_forecast_is_begun_when_a_step_has_been_recorded(batches, begun):
    asked = Asked(None)
    train(FirstSteps(Meter(), asked), batches=batches)
    assert asked.begun == begun


def test_one_that_never_comes_is_given_up(caplog):
    asked = Asked(forecast(GIB), after=1000)
    hook = FirstSteps(Meter(), asked)
    with caplog.at_level("INFO"):
        train(hook)
    assert asked.closed
    assert "forecast" not in caplog.text
    assert hook.describe().endswith("no forecast has come")
    assert "memory/forecast_used_gib" not in hook.scalars()


def test_one_that_refuses_is_one_line(caplog):
    hook = FirstSteps(Meter(), Asked(MemoryForecast(problem="the network looks at values")))
    with caplog.at_level("INFO"):
        train(hook)
    assert "no forecast: the network looks at values" in caplog.text
    assert hook.as_json()["no_forecast"] == "the network looks at values"
    assert hook.as_json()["forecast"] is None


def test_tensorboard_shows_both(tmp_path):
    hook = FirstSteps(Meter(), Asked(forecast(22 * GIB)))
    train(hook, TrainingLog([TensorBoard(tmp_path)], more=hook.scalars))
    (file,) = tmp_path.iterdir()
    shown = {
        value.tag: value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert shown["memory/measured_reserved_gib"] == pytest.approx(20)
    assert shown["memory/forecast_reserved_gib"] == pytest.approx(22)
    assert shown["memory/forecast_error_percent"] == pytest.approx(10)


def measure_together():
    start_group(on_cpu=True)
    hook = FirstSteps(Meter(find_rank()))
    train(hook)
    return [(device.process, device.reserved // GIB) for device in hook.readings[-1].devices], hook.describe()


def test_all_processes_are_read_and_the_fullest_is_told():
    first, second = in_group(2, measure_together)
    assert first == second
    devices, words = first
    assert devices == [(0, 20), (1, 21)]
    assert "21.00 GiB reserved and 10.50 GiB used of cuda:0 of process 1, the fullest of 2" in words


def test_without_a_gpu_there_is_nothing_to_read():
    meter = GpuMeter()
    if not torch.cuda.is_initialized():
        meter.begin()
        assert (meter.read(), meter.count()) == ([], 0)
    hook = FirstSteps(Meter())
    assert (hook.describe(), hook.scalars(), hook.as_json()["measured"]) == (None, {}, [])
