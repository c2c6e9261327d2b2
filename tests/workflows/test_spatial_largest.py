"""The search of the largest cube that trains, against every answer it could have."""

import math
from typing import Any

import pytest
from spatial import finished, next_side, search, table


def row(**more: Any) -> dict[str, Any]:
    return {"net": "dynunet", "gpus": 2, "multiple": 64, **more}


@pytest.mark.parametrize("first", [64, 128, 576, 1024])
@pytest.mark.parametrize("largest", range(0, 1600, 64))
def test_finds_the_largest_side_whatever_is_tried_first(first: int, largest: int) -> None:
    tries: list[dict[str, Any]] = []
    while (side := next_side(tries, first, 64)) is not None:
        assert side > 0
        assert side % 64 == 0
        assert side not in [attempt["side"] for attempt in tries]
        tries.append({"side": side, "fits": side <= largest})
    assert max((attempt["side"] for attempt in tries if attempt["fits"]), default=0) == largest
    assert len(tries) <= 10


def test_memory_that_ends_is_an_answer_and_the_search_goes_on_from_there() -> None:
    asked: list[list[int]] = []

    def ask(tried: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        asked.append(tried["sides"])
        if tried["sides"][1] > 832:
            return [{"out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}]
        return [{"ms": 1500.0, "peak_gib": 3.0, "bytes_per_voxel": 470.0}]

    found = row() | search(row(), ask, math.inf)
    assert asked == [[416, 832, 832], [448, 896, 896]]
    assert [(attempt["side"], attempt["fits"]) for attempt in found["tries"]] == [(832, True), (896, False)]
    assert finished(found)
    assert "| dynunet | 2 | 832^3 | 576 | 3.0 | 470 | 1.50 | 896^3 |" in table([found])
    found = search(row(), lambda *_: [{"error": "NCCL error: remote process exited"}], math.inf)
    assert found == {"tries": [], "error": "NCCL error: remote process exited"}  # is no answer
