"""Other ways to run a training, by forecasts or without: which come first, and how a user asks for them."""

from dataclasses import replace

import pytest

from volseg.config.loading import load_config
from volseg.errors import ConfigError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment import REGISTRIES, register
from volseg.experiment.placement.alternatives import (
    Gpus,
    build_candidate,
    get_estimate,
    list_lines,
    list_overrides,
    list_smaller,
    rank_smaller,
    run_plan,
    take_candidate,
)
from volseg.models.vnet import VNet

GIB = 2**30


def forecast(gib, seconds, refused=None, **candidate):
    memory = MemoryUse(used=gib * GIB // 2, reserved=int(gib * GIB), outside=0, peak_in="backward")
    return Estimate(candidate=Candidate(**candidate), memory=memory, seconds=seconds, refused=refused)


KNOWN = [
    forecast(20, 0.1, "needs 20.0 GiB, and there are 16.0 GiB"),
    forecast(12, 0.2, checkpoint=2, kernels="fast"),
    forecast(9, 0.3, checkpoint="all", kernels="fast"),
    forecast(19.9, 0.05, kernels="torch", data=2),
    forecast(11, 0.07, spatial=2),
    Estimate(candidate=Candidate(pipeline=2, split_size=1), refused="pool has no form"),
]


def test_what_needs_clearly_less_is_ranked_by_time_on_as_many_gpus_first():
    ranked = rank_smaller(Candidate(kernels="torch"), KNOWN)
    assert [(each.candidate.num_gpus, each.candidate.checkpoint) for each in ranked] == [
        *((1, 2), (1, "all")),
        (2, None),
    ]


def test_without_a_forecast_of_what_failed_all_that_fit_count():
    assert len(rank_smaller(Candidate(spatial=4), KNOWN)) == 4


def test_a_forecast_is_found_whichever_kernels_one_gpu_takes():
    assert get_estimate(Candidate(kernels="fast", recorded=True), KNOWN) is KNOWN[0]
    both = [KNOWN[0], replace(KNOWN[0], candidate=Candidate(kernels="torch"), seconds=9.0)]
    assert get_estimate(Candidate(kernels="torch"), both).seconds == 9.0
    assert get_estimate(Candidate(spatial=3), KNOWN) is None


def test_lines_can_be_pasted_and_have_numbers(configured, config_file):
    config = configured()
    lines = list_lines(
        config, [replace(each, candidate=replace(each.candidate, recorded=True)) for each in KNOWN[1:5]], 1
    )
    assert lines[0] == (
        "  --set parallel.strategy=spatial --set parallel.devices=1 --set parallel.checkpoint=2   "
        "12.0 GiB, 0.2 s per step"
    )
    assert lines[2].startswith("  --gpus 2 --set parallel.data=2 --set parallel.spatial=1   19.9 GiB of each GPU")
    for line, each in zip(lines, KNOWN[1:], strict=False):
        words = line.split("   ")[0].removeprefix("  ").split()
        pasted = load_config(config_file, [word for word in words if "=" in word])
        count = each.candidate.data * each.candidate.spatial
        assert build_candidate(pasted, pasted.mesh(count), 1) == replace(
            each.candidate, recorded=True, kernels="fast" if pasted.parallel.model_strategy == "spatial" else "torch"
        )


def test_kernels_that_were_asked_for_stay(configured):
    config = configured("training.kernels=torch")
    assert list_lines(config, [KNOWN[2]], 1) == []
    with pytest.raises(
        ConfigError, match=r"training\.kernels is torch, which parallel\.strategy: spatial does not run"
    ):
        take_candidate(config, KNOWN[2].candidate, 1)


@pytest.mark.parametrize(
    ("tried", "smaller"),
    [
        ({}, [(1, 1, "all", None)]),
        ({"checkpoint": "all"}, [(1, 1, "tiled", None)]),
        ({"checkpoint": "tiled"}, []),
        (
            {"data": 4},
            [(4, 1, "all", None), (2, 2, None, None), (2, 2, "all", None), (1, 4, None, None), (1, 4, "all", None)],
        ),
        ({"spatial": 2, "checkpoint": 1}, [(1, 2, "all", None)]),
        ({"pipeline": 2}, [(1, 1, None, 4)]),
        ({"pipeline": 2, "split_size": 1}, []),
    ],
)
def test_what_takes_less_of_any_network(tried, smaller):
    found = list_smaller(Candidate(**tried), 8)
    assert [(each.data, each.spatial, each.checkpoint, each.split_size) for each in found] == smaller
    assert {each.num_gpus for each in found} <= {Candidate(**tried).num_gpus}


def test_what_is_taken_is_what_is_done(configured):
    for candidate in (
        *list_smaller(Candidate(data=2, recorded=True), 2),
        Candidate(pipeline=2, split_size=1, recorded=True),
    ):
        count = candidate.data * candidate.spatial
        config = take_candidate(configured(), candidate, count)
        found = build_candidate(config, config.mesh(count), 1)
        assert replace(found, kernels=candidate.kernels) == candidate
        assert config.mesh(count).is_open is False
        assert list_overrides(configured(), config)


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
