"""The benchmark of the largest volumes, on a CPU with a simulated limit."""

import json

import pytest
from largest_volumes import UNIT, at_side, find_largest, list_searches, list_tries, next_side, run_round, summarise
from plan_accuracy_compared import forecast_row
from plan_accuracy_rows import measure

TINY = {
    **list_searches()[0],
    "net": "tiny",
    "kernels": "torch",
    "recorded": False,
    "precision": "fp32",
    "patch": [UNIT] * 3,
    "measured_s": 0,
}
VOXELS = 3 * UNIT**3
"""The pretended limit: three units of a side."""


@pytest.mark.parametrize("first", [64, 576, 1024])
@pytest.mark.parametrize("largest", range(0, 1600, 64))
def test_finds_the_largest_side_whatever_is_tried_first(first, largest):
    tries = []
    while (side := next_side(tries, first, 64)) is not None:
        assert side > 0
        assert side % 64 == 0
        assert side not in [attempt["side"] for attempt in tries]
        tries.append({"side": side, "fits": side <= largest})
    assert find_largest(tries) == largest
    assert len(tries) <= 10


def test_a_search_goes_on_where_it_was(tmp_path):
    """Each round is a separate call that reads the last one's file; tries really train, in this process."""
    rows, asked = [{**TINY, "forecast_side": 64}], []
    while tries := list(list_tries(rows, VOXELS)):
        run_round(tries, rows, lambda waiting: (row | measure(row, []) for row in waiting))
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
        asked.append(rows[0]["tries"][-1])
    assert [(found["side"], found["fits"]) for found in asked] == [(64, False), (48, True)]
    assert asked[1]["seconds"] > 0
    told = summarise(rows[0])
    assert (told["largest_forecast"], told["largest_that_trained"], told["first_that_did_not"]) == (64, 48, 64)
    assert told["trained_over_forecast"] == 0.75


def test_what_fails_by_something_else_ends_its_search_only():
    rows = [{**TINY, "forecast_side": 32}, {**TINY, "forecast_side": 32}]
    tries = list(list_tries(rows, VOXELS))
    run_round(tries, rows, lambda waiting: iter([waiting[0] | {"failed": "a process failed"}]))
    assert [row["search"] for row in list_tries(rows, VOXELS)] == [1]
    assert summarise(rows[0])["failed"]


@pytest.mark.parametrize(("side", "trained"), [(752, True), (800, False)])
def test_the_forecast_is_out_of_memory_where_an_h200_was(side, trained):
    """Of 15.4 GiB for torch; 800 planes were out of memory in the third step, after two that had trained."""
    outside = 669_843_456  # as it was beside torch then
    found = forecast_row({**at_side(list_searches()[0], side), "recorded": False}, gpu_bytes=16_509_829_120 + outside)
    assert found.runs == trained
