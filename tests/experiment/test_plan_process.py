"""A plan that a training asks for, by a process of its own: its answer, its refusals, and its end."""

from volseg.experiment import REGISTRIES, register
from volseg.experiment.placement.alternatives import build_candidate, get_estimate, list_lines, rank_smaller
from volseg.experiment.placement.plan_process import Gpus, run_plan
from volseg.models.vnet import VNet

GIB = 2**30
H200 = Gpus(name="NVIDIA H200", memory=139 * GIB)


def test_a_training_is_estimated_and_what_takes_less(configured, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)  # it is none of the job's processes, nor waits for them
    network = "network={name: UNet, channels: [16, 32], strides: [2], num_res_units: 2}"
    config = configured("patch.size=[256,256,256]", network)
    tried = build_candidate(config, config.mesh(1), 1)
    answer = run_plan(config, H200, thorough=True)
    assert not answer.problem
    assert answer.reserve > 0
    failed, smaller = get_estimate(tried, answer.forecasts), rank_smaller(tried, answer.forecasts)
    assert failed.memory.reserved >= failed.memory.used > 0
    assert smaller
    for each in smaller:
        assert each.candidate.checkpoint is not None
        assert each.memory.used < failed.memory.used
        assert each.seconds > 0
    assert "GiB, " in list_lines(config, smaller, 1)[0]


def test_components_of_this_process_are_refused_by_name(configured):
    """It is another process's word, and raises nothing here."""
    register("network", "OfThisTest", VNet)
    try:
        assert "OfThisTest" in run_plan(configured("network={name: OfThisTest}"), H200).problem
    finally:
        REGISTRIES["network"].forget("OfThisTest")


def test_one_that_takes_too_long_is_ended(configured):
    assert run_plan(configured(), H200, seconds=0).problem == "it was not there after 0 s"
