"""Recomputed tile by tile equals the plain network: outputs, every gradient, buffers, steps; in float64."""

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel, Spatial
from volseg.parallel.spatial.convolution import plan, tiles
from volseg.parallel.spatial.lazy import transposed
from volseg.parallel.verification.verify import TOLERANCE, compare

spatial = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("spatial_cases.py"))))
bits = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("data_parallel_cases.py"))))

SMALL = 64
"""Elements of a tile: so few that slabs of a test are cut into as many tiles as they can be."""


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    with patch.object(plan, "TILE_ELEMENTS", SMALL):
        yield


@pytest.fixture
def counted() -> Iterator[dict[str, int]]:
    """Count convolutions that are taken by tiles, and transposed ones that wait."""
    found = {"convolutions": 0, "transposed": 0}

    def counting(name: str, function: Callable) -> Callable:
        def count(*args: Any) -> Any:
            result = function(*args)
            found[name] += result is not None
            return result

        return count

    with (
        patch.object(tiles._ConvolveByTiles, "apply", counting("convolutions", tiles._ConvolveByTiles.apply)),
        patch.object(transposed._Transposed, "apply", counting("transposed", transposed._Transposed.apply)),
    ):
        yield found


def run(name: str, **where: Any) -> dict[str, float]:
    """Return the errors of two steps of a case."""
    case = {**spatial.CASES, "vnet": spatial.VNET}[name]
    tiled = replace(case, steps=2, options={**case.options, "checkpoint": "tiled"})
    return spatial.run(tiled, **where)


def run_in_process(name: str) -> dict[str, float]:
    with patch.object(plan, "TILE_ELEMENTS", SMALL):
        return run(name)


def assert_equal(errors: dict[str, float]) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"largest relative errors: {wrong}"


@pytest.mark.parametrize("name", sorted(spatial.CASES))
def test_every_network_by_tiles_equals_the_plain_one(name: str) -> None:
    assert_equal(run(name, devices=["cpu"]))


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("name", ["dynunet all recomputed", "channels last", "vnet"])
def test_slabs_of_one_process_by_tiles_equal_one_device(name: str, shards: int, counted: dict[str, int]) -> None:
    assert_equal(run(name, devices=["cpu"] * shards, fixed_order=True))
    assert counted["convolutions"] > 0


@pytest.mark.parametrize("name", ["dynunet all recomputed", "channels last, one sample", "unet group"])
def test_processes_by_tiles_equal_one_device(name: str) -> None:
    for errors in in_group(2, run_in_process, name):
        assert_equal(errors)
