"""The search of the largest cube that trains, against every answer it could have."""

from typing import Any

import pytest
from spatial import finished, forecast, next_side, same_volume, search, table


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


def test_first_guess_grows_with_memory_and_gpus() -> None:
    assert [forecast(150e9, gpus, 64) for gpus in (1, 2, 4, 8)] == [640, 832, 1024, 1280]
    assert forecast(1e6, 1, 64) == 64


def test_memory_that_ends_is_an_answer_and_goes_on_from_there() -> None:
    def measure(shape: list[int]) -> dict[str, Any]:
        if shape[0] > 128:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return {"ms": 1500.0, "peak_gib": 3.0, "bytes_per_voxel": 470.0}

    told: list[int] = []
    tried = row(first=128, tries=[])
    found = search(tried, measure, lambda known: told.append(len(known["tries"])))
    assert found["ended"] == "out of memory"
    assert told == [1]
    assert [(attempt["side"], attempt["fits"]) for attempt in found["tries"]] == [(128, True), (192, False)]
    assert finished(tried | found)
    assert "| dynunet | 2 | 128^3 | 2 | 3.0 | 470 | 1.50 | 192^3 |" in table([tried | found])


def test_other_errors_are_no_answer() -> None:
    def measure(shape: list[int]) -> dict[str, Any]:
        raise RuntimeError("NCCL error: remote process exited")

    with pytest.raises(RuntimeError, match="remote process exited"):
        search(row(first=64), measure, lambda known: None)


def test_compares_the_peak_of_n_gpus_with_one_nth_of_that_of_one() -> None:
    found = [row(part="same", gpus=1, peak_gib=40.0), row(part="same", gpus=4, peak_gib=10.4), row(part="weak", gpus=2)]
    assert same_volume(found) == [{"net": "dynunet", "gpus": 4, "peak_over_share_of_one": pytest.approx(1.04)}]
    assert same_volume(found[1:]) == []
