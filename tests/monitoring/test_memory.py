"""The memory of a training's first steps, with or without an estimate."""

import json

import pytest
import torch
from in_group import in_group
from torch.nn import functional

from volseg import Training
from volseg.estimate.step_memory import MemoryUse
from volseg.monitoring.memory import DeviceMemory, FirstSteps, GpuMeter
from volseg.parallel.devices import get_process_rank
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


def forecast(reserved):
    return MemoryUse(used=reserved // 2, reserved=reserved, outside=0, peak_in="backward")


def train(*hooks, batches=12, epochs=1, accumulate=1):
    net = torch.nn.Conv3d(1, 2, 1)
    made = [{"image": torch.ones(1, 1, 2, 2, 2), "label": torch.zeros(1, 2, 2, 2).long()}] * batches
    optimizer, options = torch.optim.SGD(net.parameters(), lr=0.1), {"epochs": epochs, "accumulate": accumulate}
    Training(net, functional.cross_entropy, optimizer, made, hooks=hooks, **options).run()


@pytest.mark.parametrize(
    ("batches", "epochs", "accumulate", "steps"), [(12, 1, 1, 8), (12, 2, 3, 4), (3, 2, 1, 3), (1, 1, 1, 1)]
)
def test_the_first_steps_are_read_once(batches, epochs, accumulate, steps):
    hook = FirstSteps(Meter())
    train(hook, batches=batches, epochs=epochs, accumulate=accumulate)
    assert (hook.steps, [device.reserved // GIB for device in hook.devices]) == (steps, [10])


def test_one_line_and_the_record_say_how_far_the_estimate_is(caplog):
    written = []
    hook = FirstSteps(Meter(), forecast(10 * GIB), beside=2 * GIB, write=written.append)
    with caplog.at_level("INFO"):
        train(hook)
    words = (
        "memory after 8 steps: 10.00 GiB reserved and 5.00 GiB used on cuda:0 of process 0, the fullest of 1 GPU(s), "
        "including 2.00 GiB of cases; estimate of a step: 10.00 GiB reserved and 5.00 GiB used (+25.0%)"
    )
    assert words in caplog.text
    (last,) = json.loads(json.dumps(written))
    assert [reading["steps"] for reading in last["measured"]] == [8]
    assert last["error"] == pytest.approx(0.25)
    assert last["forecast"]["peak_in"] == "backward"


def test_without_a_plan_or_a_gpu_nothing_is_compared(caplog):
    hook = FirstSteps(Meter())
    assert (hook.describe(), hook.as_json()["measured"]) == (None, [])
    with caplog.at_level("INFO"):
        train(hook)
    assert "memory after 8 steps: 10.00 GiB reserved" in caplog.text
    assert "estimate" not in caplog.text
    assert (hook.as_json()["forecast"], hook.as_json()["error"]) == (None, None)
    meter = GpuMeter()
    if not torch.cuda.is_initialized():
        meter.begin()
        assert (meter.read(), meter.count()) == ([], 0)


def measure_together():
    start_group(on_cpu=True)
    hook = FirstSteps(Meter(get_process_rank()))
    train(hook)
    return [(device.process, device.reserved // GIB) for device in hook.devices], hook.describe()


def test_all_processes_are_read_and_the_fullest_is_told():
    first, second = in_group(2, measure_together)
    assert first == second
    devices, words = first
    assert devices == [(0, 10), (1, 11)]
    assert "11.00 GiB reserved and 5.50 GiB used on cuda:0 of process 1, the fullest of 2 GPU(s)" in words
