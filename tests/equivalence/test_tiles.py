"""Recomputed tile by tile equals the plain network: outputs, every gradient, buffers, steps; in float64."""

import copy
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
from beside_plain import WAYS, assert_no_coarser, assert_small, measure_rounding, on_slabs
from in_group import in_group
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel, Spatial
from volseg.parallel.spatial.convolution import plan, tiles
from volseg.parallel.spatial.lazy import transposed
from volseg.parallel.verification.verify import compare

spatial = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("spatial_cases.py"))))

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


TILED = {
    "dynunet all recomputed": (True, True),
    "dynunet residual anisotropic": (True, True),
    "segresnet deconv": (True, True),
    "segresnet": (True, False),
}
"""Cases, and whether convolutions and transposed ones are taken by tiles in them."""


@pytest.mark.parametrize("name", sorted(TILED))
def test_a_network_by_tiles_equals_the_plain_one(name: str, counted: dict[str, int]) -> None:
    assert_small(run(name, devices=["cpu"]))
    assert (counted["convolutions"] > 0, counted["transposed"] > 0) == TILED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*spatial.CASES, "vnet"} - set(TILED)))
def test_every_other_network_by_tiles_equals_the_plain_one(name: str) -> None:
    assert_small(run(name, devices=["cpu"]))


@pytest.mark.parametrize("name", ["dynunet all recomputed", "channels last"])
def test_slabs_of_one_process_by_tiles_equal_one_device(name: str, counted: dict[str, int]) -> None:
    assert_small(run(name, devices=["cpu"] * 2, fixed_order=True))
    assert counted["convolutions"] > 0
    assert counted["transposed"] > 0


@pytest.mark.parametrize("name", ["channels last, one sample"])
def test_processes_by_tiles_equal_one_device(name: str) -> None:
    for errors in in_group(2, run_in_process, name):
        assert_small(errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynunet all recomputed", "attention unet", "vnet"])
def test_more_processes_by_tiles_equal_one_device(name: str) -> None:
    for errors in in_group(3, run_in_process, name):
        assert_small(errors)


class Level(nn.Module):
    """A level's way down and up, of kernels, paddings and dilations that differ along the dims."""

    def __init__(self, kernel: Any, dilation: Any = 1, bias: bool = True, groups: int = 1) -> None:
        super().__init__()
        padding = [d * (k - 1) // 2 for k, d in zip(three(kernel), three(dilation), strict=True)]
        how = {"padding": padding, "dilation": dilation, "bias": bias, "groups": groups}
        self.first = nn.Conv3d(1, 4, kernel, padding=padding, dilation=dilation)
        self.norm, self.down = nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 4, 2, 2)
        self.low, self.up = nn.InstanceNorm3d(4), nn.ConvTranspose3d(4, 4, 2, 2, bias=bias, groups=groups)
        self.way_up = nn.Sequential(nn.Conv3d(8, 4, kernel, **how), nn.BatchNorm3d(4), nn.ReLU())
        self.head = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.leaky_relu(self.norm(self.first(x)), 0.1)
        low = F.elu(self.low(self.down(skip)))
        return self.head(self.way_up(torch.cat([self.up(low), skip], 1)))


def three(value: Any) -> list[int]:
    return [value] * 3 if isinstance(value, int) else list(value)


LEVELS: dict[str, dict[str, Any]] = {
    "usual": {"kernel": 3},
    "wide": {"kernel": 5, "bias": False},
    "dilated": {"kernel": 3, "dilation": 2},
    "flat": {"kernel": (1, 3, 5)},
    "grouped": {"kernel": (3, 1, 3), "groups": 2},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", sorted(LEVELS))
def test_a_level_by_tiles_equals_the_plain_one(
    name: str, samples: int, training: bool, counted: dict[str, int]
) -> None:
    torch.manual_seed(7)
    plain = Level(**LEVELS[name]).double().train(training)
    for shards, channels_last in ((1, False), (1, True), (2, False)):
        options = Spatial(checkpoint="tiled", fixed_order=shards > 1, channels_last=channels_last)
        before = dict(counted)
        model = ModelParallel(copy.deepcopy(plain), strategy=options, devices=["cpu"] * shards)
        volume = torch.randn(samples, 1, 20, 6, 8, dtype=torch.float64)
        assert_small(compare(copy.deepcopy(plain), model, [volume], steps=2))
        assert all(counted[kind] > before[kind] for kind in counted)


def test_frozen_parameters_get_no_gradient_and_the_others_theirs() -> None:
    torch.manual_seed(7)
    plain = Level(3).double()
    for module in (plain.first, plain.norm, plain.up, plain.way_up[0]):
        module.requires_grad_(False)
    model = ModelParallel(copy.deepcopy(plain), strategy=Spatial(checkpoint="tiled"), devices=["cpu"])
    assert_small(compare(plain, model, [torch.randn(1, 1, 20, 6, 8, dtype=torch.float64)], steps=2))


def test_half_precision_is_as_near_to_the_plain_network_as_without_tiles(counted: dict[str, int]) -> None:
    """The weight's gradient is added up over tiles in float32: what it differs by is the rounding of what it reads."""
    torch.manual_seed(7)
    net, volume = Level(3), torch.randn(1, 1, 20, 16, 16)
    plain, whole, tiled = measure_rounding(net, volume, None, WAYS["one, recomputed"], on_slabs(1, checkpoint="tiled"))
    assert counted["convolutions"] > 0
    assert_no_coarser(tiled, plain, whole)


def test_an_input_that_changed_in_place_is_refused_by_tiles() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            before = self.first(x)
            normal = self.norm(before)
            result = self.last(normal)
            before.slabs[0].data.add_(1.0)
            torch.autograd.graph.increment_version(before.slabs[0])
            return result + normal

    model = ModelParallel(Changing().double(), strategy=Spatial(checkpoint="tiled"), devices=["cpu"])
    with pytest.raises(UnsupportedOperatorError, match="changed in place"):
        model(torch.randn(1, 1, 20, 6, 8, dtype=torch.float64))
