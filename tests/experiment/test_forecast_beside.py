"""A forecast of a running training, by a process beside it: its answer, its refusals, and its end."""

import os
import time

import pytest

from volseg.experiment import REGISTRIES, register
from volseg.experiment.alternatives import find_candidate, find_forecast, list_lines, rank_smaller
from volseg.experiment.forecast_beside import AskedOfCandidate, Gpus, PlanBeside
from volseg.lifetime import is_running
from volseg.models.vnet import VNet

GIB = 2**30
H200 = Gpus(name="NVIDIA H200", memory=139 * GIB)


@pytest.fixture
def ask():
    """Return a function that begins a forecast, which does not outlive the test."""
    begun = []

    def beginning(config, gpus, **options):
        begun.append(PlanBeside(config, gpus, **options))
        return begun[-1]

    yield beginning
    for plan in begun:
        plan.close()


def test_a_training_is_forecast_beside_it_and_what_takes_less(configured, ask, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)  # it is none of the job's processes, nor waits for them
    network = "network={name: UNet, channels: [16, 32], strides: [2], num_res_units: 2}"
    config = configured("patch.size=[256,256,256]", network)
    tried = find_candidate(config, config.mesh(1), 1)
    plan = ask(config, H200, thorough=True)
    asked = AskedOfCandidate(lambda: plan, tried)
    assert asked.poll() is None  # nobody has begun it
    asked.begin()
    assert asked.poll() is None  # nobody waits
    answer = plan.wait()
    assert not answer.problem
    assert asked.poll().memory.reserved >= asked.poll().memory.used > 0
    assert answer.reserve > 0
    failed, smaller = find_forecast(tried, answer.forecasts), rank_smaller(tried, answer.forecasts)
    assert smaller
    for each in smaller:
        assert each.candidate.checkpoint is not None
        assert each.memory.total < failed.memory.total
        assert each.seconds > 0
    assert "GiB, " in list_lines(config, smaller, 1)[0]


def test_one_that_refuses_says_why_and_raises_nothing(configured, ask):
    plan = ask(configured("network={name: Unett}"), H200)
    assert "no network is called 'Unett'" in plan.wait().problem
    asked = AskedOfCandidate(lambda: plan, find_candidate(configured(), configured().mesh(1), 1))
    asked.begin()
    told = asked.poll()
    assert told.memory is None
    assert "no network is called 'Unett'" in told.problem


def test_components_of_this_process_alone_are_no_matter_of_another(configured, ask):
    register("network", "OfThisTest", VNet)
    try:
        assert "OfThisTest" in ask(configured("network={name: OfThisTest}"), H200).wait().problem
    finally:
        REGISTRIES["network"].forget("OfThisTest")


def test_it_ends_with_the_training_and_leaves_nothing(configured, ask):
    plan = ask(configured(), H200)
    process, folder = plan._process, plan._folder.name
    plan.close()
    end = time.monotonic() + 30
    while is_running(process.pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(process.pid)
    assert not os.path.exists(folder)
