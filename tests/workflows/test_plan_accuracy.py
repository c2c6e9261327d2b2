"""The benchmark of estimates: its configurations, one of them measured, and errors computed by hand."""

import networks_listed
import plan_accuracy_compared
import pytest
import torch
from plan_accuracy_compared import choose_on_one, compare, describe, judge_choices, summarise
from plan_accuracy_rows import NETWORKS, fill_row, measure

from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.step_memory import MemoryUse
from volseg.models.networks import build_network

MIB = 2**20
TINY = {"net": "tiny", "patch": [16] * 3, "batch": 1, "precision": "fp32", "measured_s": 0}


def test_a_configuration_is_measured_in_this_process():
    found = measure(fill_row(**TINY), [])
    assert found["seconds"] > 0
    assert len(found["seconds_all"]) >= 3


@pytest.fixture
def compared():
    # The GPU that uses most need not be the one that is fullest.
    measured = {"max_memory_reserved": [90 * MIB, 100 * MIB], "max_memory_allocated": [85 * MIB, 80 * MIB]}
    measured["seconds_not_waited_for"] = 2.0
    way = {"kernels": "torch", "spatial": 1, "pipeline": 1, "checkpoint": None, "recorded": False}
    measured |= {"patch": [32] * 3, "batch": 1, "precision": "bf16", "ema": None, "layout": "contiguous"}
    measured["split_size"] = None
    measured |= {"net": "vnet", "beside": {"end": [20 * MIB]}, **way}
    rows = [{"name": f"vnet {number}", **measured, "recorded": number == 1} for number in range(3)]
    forecasts = [
        Estimate(
            candidate=Candidate(),
            memory=MemoryUse(used=used * MIB, reserved=reserved * MIB, outside=20 * MIB, peak_in="backward"),
            seconds=1.0,
        )
        for used, reserved in ((80, 100), (88, 110))
    ]
    forecasts.append(Estimate(candidate=Candidate(), refused="it looks at values"))
    told = []
    found = compare([*rows, {"name": "lost", "failed": "no result"}], told.append, find=lambda row: forecasts.pop(0))
    assert told == found
    return found


def test_errors_are_relative_to_what_was_measured(compared):
    assert [found.get("reserved_error") for found in compared] == [0, pytest.approx(0.1), None]
    assert [found.get("used_error") for found in compared] == [0, pytest.approx(0.1), None]
    assert compared[1]["total_error"] == pytest.approx(130 / 120 - 1)
    assert describe(compared[1]) == "vnet 1: used +10.0%, reserved +10.0%, total +8.3%, seconds -50.0%"
    assert describe(compared[2]) == "vnet 2: not forecast: it looks at values"


def test_the_summary_names_the_worst(compared):
    told = summarise(compared)
    assert (told["compared"], told["not_forecast"]) == (2, 1)
    assert told["reserved"] == {"median": pytest.approx(0.05), "worst": pytest.approx(0.1), "worst_of": "vnet 1"}
    assert told["seconds"]["median"] == 0.5


def test_networks_of_the_list_are_those_whose_speed_is_compared():
    """Their parameters have the names and shapes of ``networks.py``'s."""
    for ours, theirs in {"unet_residual": "UNet", "residual_encoder": "ResEncUNet", "highresnet": "HighResNet"}.items():
        with torch.device("meta"):
            net = build_network(NETWORKS[ours], in_channels=1, out_channels=3, patch_size=[128] * 3)
            other = networks_listed.build(theirs, (128, 128, 128))
        sizes = [{name: each.shape for name, each in one.state_dict().items()} for one in (net, other)]
        assert sizes[0] == sizes[1], ours


@pytest.fixture
def ways():
    """A size in three ways: 100, 60 and 40 MiB, in 1, 2 and 3 seconds, and forecasts that are exact."""
    found = []
    for number, (size, seconds, checkpoint) in enumerate(((90, 1.0, None), (50, 2.0, 1), (30, 3.0, "all"))):
        way = {"spatial": 1, "pipeline": 1, "split_size": None, "kernels": "fast", "recorded": True}
        row = {"name": f"way {number}", "size": ["dynunet", [64] * 3], "way": {**way, "checkpoint": checkpoint}}
        for kind in ("measured", "forecast"):
            row |= {f"{kind}_reserved": size * MIB, f"{kind}_used": 20 * MIB, f"{kind}_outside": 10 * MIB}
            row[f"{kind}_seconds"] = seconds
        found.append(row)
    return found


def test_the_fastest_way_that_fits_is_chosen_on_gpus_of_several_memories(ways):
    judged = judge_choices(ways)
    assert [one["capacity"] // MIB for one in judged] == [50, 80, 200]
    assert [one["chosen"] for one in judged] == [one["fastest"] for one in judged] == ["way 2", "way 1", "way 0"]
    assert [one["over_fastest"] for one in judged] == [1.0, 1.0, 1.0]


def test_a_wrong_forecast_is_a_wrong_choice(ways):
    """The second is forecast to be the fastest, and the first one to fit where it does not."""
    ways[1]["forecast_seconds"] = 0.5
    ways[0]["forecast_reserved"] = 40 * MIB
    ways[2]["forecast_reserved"] = 70 * MIB
    judged = judge_choices(ways)
    assert [(one["chosen"], one["fitted"]) for one in judged] == [("way 0", False), ("way 1", True), ("way 1", True)]
    assert judged[2]["over_fastest"] == 2.0


def test_random_sizes_for_one_gpu_take_the_fastest_that_fits(monkeypatch):
    """With little memory activations are recomputed; rows record the estimate."""
    monkeypatch.setattr(plan_accuracy_compared, "NETWORKS", {"dynunet": NETWORKS["tiny"]})
    small = fill_row("dynunet", patch=[64] * 3, precision="fp32")
    enough = choose_on_one(small, 4 * 2**30)
    assert enough.candidate.checkpoint is None
    less = choose_on_one(small, enough.memory.total - 8 * MIB)
    assert less is None or less.candidate.checkpoint is not None
    assert choose_on_one(small, 64 * MIB) is None
