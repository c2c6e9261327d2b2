"""Kernels of one step are matched with those of another: constructed ones, and recorded ones of an H200."""

import gzip
import json

import pytest

from volseg.profiling.kernels import StepPlace, TimedKernel, find_kind, travels
from volseg.profiling.trace_file import ReadKernel, match

FILES = [
    "dynunet_h200_kernels_weak128_rank0",
    "dynunet_h200x4_kernels_weak128_rank1",
    "vnet_h200x2_kernels_weak320_rank0",
]


def seen(name, grid=(), seconds=1.0, layer=""):
    return ReadKernel(
        timed=TimedKernel(name=name, place=StepPlace(layer, "forward"), start=0, seconds=seconds), grid=grid
    )


def read_steps(request, name):
    """Return the kernels of both steps of a stored profile: those of a recording, on the streams of two replays."""
    file = request.config.rootpath / "workflows" / "benchmarks" / "results" / f"{name}.json.gz"
    kernels = sorted(json.loads(gzip.decompress(file.read_bytes())))
    found = [seen(each[3], tuple(each[4] or ()), each[1] * 1e-6, str(number)) for number, each in enumerate(kernels)]
    half = len(found) // 2
    return found[:half], found[half:]


@pytest.mark.parametrize("name", FILES)
def test_a_step_of_an_h200_is_found_in_the_next_one(request, name):
    first, second = read_steps(request, name)
    places, matched = match(second, first)
    assert matched == 1.0
    assert sorted(int(place.layer) for place in places) == list(range(len(first))), "each found once"
    for kernel, place in zip(second, places, strict=True):
        eager = first[int(place.layer)]
        assert (eager.timed.name, eager.grid) == (kernel.timed.name, kernel.grid)


@pytest.mark.parametrize("name", FILES)
def test_every_long_kernel_of_an_h200_is_of_a_kind(request, name):
    first, _ = read_steps(request, name)
    kernels = [kernel.timed for kernel in first]
    total = sum(kernel.seconds for kernel in kernels)
    convolving = sum(kernel.seconds for kernel in kernels if find_kind(kernel.name) == "convolution")
    assert convolving > total / 3, "these are convolutional networks"
    assert any(travels(kernel.name) for kernel in kernels) == ("x" in name.partition("_")[2].partition("_")[0])


def test_sorts_that_differ_in_number_are_not_guessed():
    eager = [*[seen("a", layer="one")] * 2, seen("b", (2,), layer="two")]
    replayed = [seen("b", (1,)), seen("a"), seen("c")]
    places, matched = match(replayed, eager)
    assert [place.layer for place in places] == ["two", "two", "two"], "b by its name, the others behind it"
    assert matched == pytest.approx(1 / 3)


def test_nothing_is_all_of_nothing():
    assert match([], []) == ([], 1.0)
