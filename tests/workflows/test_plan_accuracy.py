"""The benchmark of forecasts: its configurations, one of them measured, and errors computed by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from plan_accuracy_compared import compare, describe, plot, summarise
from plan_accuracy_rows import list_rows, measure, name_row

from volseg.forecast.candidate import Candidate, Forecast
from volseg.forecast.memory_use import MemoryUse

MIB = 2**20
TINY = {"net": "tiny", "patch": [16] * 3, "batch": 1, "precision": "fp32"}


def test_configurations_are_many_and_have_different_names():
    rows = list_rows()
    assert len(rows) >= 40
    assert len({name_row(row) for row in rows}) == len(rows)


def test_a_configuration_is_measured_in_this_process():
    found = measure({**list_rows()[0], **TINY}, [], None)
    assert found["seconds"] > 0
    assert [mark["mark"] for mark in found["marks"][:8]] == [
        *("place", "placed", "step", "forward", "loss", "backward", "optimizer", "end")
    ]


@pytest.fixture
def compared():
    measured = {"max_memory_reserved": [100 * MIB], "max_memory_allocated": [80 * MIB], "seconds_not_waited_for": 2.0}
    way = {"kernels": "torch", "spatial": 1, "pipeline": 1, "checkpoint": None, "recorded": False}
    measured |= {"net": "vnet", "beside": {"end": [20 * MIB]}, **way}
    rows = [{"name": f"vnet {number}", **measured, "recorded": number == 1} for number in range(3)]
    memory = [
        MemoryUse(used=80 * MIB, reserved=size * MIB, outside=20 * MIB, peak_in="backward") for size in (100, 110)
    ]
    forecasts = [Forecast(candidate=Candidate(), memory=use, seconds=1.0) for use in memory]
    forecasts.append(Forecast(candidate=Candidate(), refused="it looks at values"))
    told = []
    found = compare([*rows, {"name": "lost", "failed": "no result"}], told.append, lambda row: forecasts.pop(0))
    assert told == found
    return found


def test_errors_are_relative_to_what_was_measured(compared):
    assert [found.get("reserved_error") for found in compared] == [0, pytest.approx(0.1), None]
    assert compared[1]["total_error"] == pytest.approx(130 / 120 - 1)
    assert describe(compared[1]) == "vnet 1: used +0.0%, reserved +10.0%, total +8.3%, seconds -50.0%"
    assert [found["changed_since"] for found in compared] == [[], ["recordings"], []]
    assert describe(compared[2]) == "vnet 2: not forecast: it looks at values"


def test_the_summary_names_the_worst(compared):
    told = summarise(compared)
    assert (told["compared"], told["not_forecast"]) == (2, 1)
    assert told["reserved"] == {"median": pytest.approx(0.05), "worst": pytest.approx(0.1), "worst_of": "vnet 1"}
    assert told["seconds"]["median"] == 0.5


def test_the_plot_has_a_dot_for_each(compared, tmp_path):
    plot(compared, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").count("<circle") == 2 + 5
