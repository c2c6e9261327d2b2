"""Sums that are written tile by tile equal the plain network's: outputs, every gradient, buffers, steps; in float64.

Only sums of two element types are, which float64 has none of: there the rule is switched off that says so.
"""

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
from volseg.parallel.spatial.convolution import plan
from volseg.parallel.spatial.lazy import tiled_addition
from volseg.parallel.verification.verify import compare

spatial = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("spatial_cases.py"))))


def always(first: torch.dtype, second: torch.dtype) -> bool:
    return first.is_floating_point and second.is_floating_point


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    with patch.object(plan, "TILE_ELEMENTS", 64):
        yield


@pytest.fixture
def written_by_tiles() -> Iterator[list[int]]:
    """Count the backward passes of sums by tiles, and those of any type."""
    found: list[int] = []
    backward = tiled_addition._AddInTiles.backward

    def count(ctx: Any, *gradients: Tensor) -> Any:
        found.append(len(gradients))
        return backward(ctx, *gradients)

    with (
        patch.object(tiled_addition, "has_fewer_digits", always),
        patch.object(tiled_addition._AddInTiles, "backward", staticmethod(count)),
    ):
        yield found


def run_vnet(**where: Any) -> dict[str, float]:
    case = replace(spatial.VNET, steps=2, options={**spatial.VNET.options, "checkpoint": "tiled"})
    return spatial.run(case, **where)


def run_vnet_in_process() -> dict[str, float]:
    with patch.object(plan, "TILE_ELEMENTS", 64), patch.object(tiled_addition, "has_fewer_digits", always):
        return run_vnet()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]])
def test_vnet_with_sums_by_tiles_equals_the_plain_one(devices: list[str], written_by_tiles: list[int]) -> None:
    assert_small(run_vnet(devices=devices, fixed_order=len(devices) > 1))
    assert len(written_by_tiles) >= 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_vnet_on_processes_with_sums_by_tiles_equals_the_plain_one(processes: int) -> None:
    for errors in in_group(processes, run_vnet_in_process):
        assert_small(errors)


class Residual(nn.Module):
    """V-Net's finest level: the image is added to each channel, and a join to what follows from it."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm3d, act: Any = F.elu, inner: Any = F.elu) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 4, 5, padding=2), norm(4)
        self.down, self.low = nn.Conv3d(4, 8, 2, 2), norm(8)
        self.up, self.high = nn.ConvTranspose3d(8, 4, 2, 2), norm(4)
        self.way_up, self.last = nn.Conv3d(8, 8, 5, padding=2), norm(8)
        self.head = nn.Sequential(nn.Conv3d(8, 3, 5, padding=2), norm(3), nn.ELU(), nn.Conv3d(3, 3, 1))
        self.act, self.inner = act, inner

    def forward(self, x: Tensor) -> Tensor:
        skip = self.act(torch.add(self.norm(self.first(x)), x.repeat([1, 2, 1, 1, 1])))
        low = F.elu(self.low(self.down(skip)))
        joined = torch.cat((self.inner(self.high(self.up(low))), skip), 1)
        out = self.inner(self.last(self.way_up(joined)))
        return self.head(self.act(torch.add(joined, out) if isinstance(self.norm, nn.InstanceNorm3d) else out + joined))


def in_place(x: Tensor) -> Tensor:
    return F.elu(x, inplace=True)


def nothing(x: Tensor) -> Tensor:
    return x


class Sloped(nn.Module):
    """One PReLU for two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(x)


NETWORKS: dict[str, dict[str, Any]] = {
    "vnet": {"act": in_place},
    "instance": {"norm": lambda channels: nn.InstanceNorm3d(channels, affine=True)},
    "plain": {"norm": nn.InstanceNorm3d, "act": nothing},
    "group": {"norm": lambda channels: nn.GroupNorm(1, channels), "act": F.silu, "inner": F.gelu},
    "slopes inside": {"inner": Sloped()},
    "slopes behind": {"act": Sloped()},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_level_with_sums_by_tiles_equals_the_plain_one(
    name: str, training: bool, written_by_tiles: list[int]
) -> None:
    torch.manual_seed(7)
    plain = Residual(**NETWORKS[name]).double().train(training)
    places = ((["cpu"], False, 1), (["cpu"], True, 2), (["cpu", "cpu:1"], True, 1))
    for devices, channels_last, samples in places:
        options = Spatial(checkpoint="tiled", fixed_order=len(devices) > 1, channels_last=channels_last)
        before = len(written_by_tiles)
        model = ModelParallel(copy.deepcopy(plain), strategy=options, devices=devices)
        volume = torch.randn(samples, 2, 20, 6, 8, dtype=torch.float64)
        assert_small(compare(copy.deepcopy(plain), model, [volume], steps=2))
        assert len(written_by_tiles) > before


def compare_level() -> dict[str, float]:
    torch.manual_seed(7)
    plain = Residual(act=in_place).double()
    with patch.object(plan, "TILE_ELEMENTS", 64), patch.object(tiled_addition, "has_fewer_digits", always):
        model = ModelParallel(copy.deepcopy(plain), strategy=Spatial(checkpoint="tiled"))
        volume = torch.randn(1, 2, 20, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        return compare(plain, model, [volume], steps=2)


def test_processes_with_sums_by_tiles_equal_one_device() -> None:
    for errors in in_group(2, compare_level):
        assert_small(errors)


@pytest.mark.parametrize("frozen", ["first", "norm", "high", "last", "up"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(frozen: str, written_by_tiles: list[int]) -> None:
    torch.manual_seed(7)
    plain = Residual().double()
    getattr(plain, frozen).requires_grad_(False)
    model = ModelParallel(copy.deepcopy(plain), strategy=Spatial(checkpoint="tiled"), devices=["cpu"])
    assert_small(compare(plain, model, [torch.randn(1, 2, 20, 6, 8, dtype=torch.float64)], steps=2))
    assert written_by_tiles


class ReadTwice(Residual):
    """What is added up is read by a convolution, looked at, and added again."""

    def forward(self, x: Tensor) -> Tensor:
        skip = F.elu(torch.add(self.norm(self.first(x)), x.repeat([1, 2, 1, 1, 1])))
        wide = self.way_up(torch.cat((skip, skip), 1))
        total = F.elu(self.last(wide) + torch.cat((skip, skip), 1))
        return self.head(total) + total[:, :3] * skip.mean() + total.mean()


def test_a_sum_that_others_read_too_gets_all_of_its_gradient(written_by_tiles: list[int]) -> None:
    torch.manual_seed(7)
    plain = ReadTwice().double()
    for devices in (["cpu"], ["cpu", "cpu:1"]):
        options = Spatial(checkpoint="tiled", fixed_order=len(devices) > 1)
        model = ModelParallel(copy.deepcopy(plain), strategy=options, devices=devices)
        volume = torch.randn(1, 2, 20, 6, 8, dtype=torch.float64)
        assert_small(compare(copy.deepcopy(plain), model, [volume], steps=2))
    assert written_by_tiles


def test_half_precision_is_as_near_to_float64_as_without_tiles() -> None:
    """Under autocast the sums have two types, as V-Net's; nothing is rounded that the plain network does not round."""
    torch.manual_seed(7)
    backward, taken = tiled_addition._AddInTiles.backward, []

    def count(ctx: Any, *gradients: Tensor) -> Any:
        taken.extend(gradient.dtype for gradient in gradients)
        return backward(ctx, *gradients)

    net, volume = Residual(act=in_place), torch.randn(1, 2, 20, 16, 16)
    ways = None, WAYS["one, recomputed"], on_slabs(1, checkpoint="tiled")
    with patch.object(tiled_addition._AddInTiles, "backward", staticmethod(count)):
        plain, whole, tiled = measure_rounding(net, volume, *ways)
    # The skip's gradient is float32, as in the plain network; the last sum's is the convolution's own.
    assert set(taken) == {torch.float32, torch.bfloat16}
    assert_no_coarser(tiled, plain, whole)


def test_a_hook_on_a_sum_by_tiles_gets_its_gradient_or_is_refused(written_by_tiles: list[int]) -> None:
    torch.manual_seed(7)
    seen: list[Tensor] = []

    class Hooked(Residual):
        def forward(self, x: Tensor) -> Tensor:
            total = F.elu(self.norm(self.first(x)) + x.repeat([1, 2, 1, 1, 1]))
            total.register_hook(lambda gradient: seen.append(getattr(gradient, "full_tensor", lambda: gradient)()))
            return self.way_up(torch.cat((total, total), 1))

    plain = Hooked().double()
    model = ModelParallel(copy.deepcopy(plain), strategy=Spatial(checkpoint="tiled"), devices=["cpu"])
    volume = torch.randn(1, 2, 20, 6, 8, dtype=torch.float64)
    plain(volume).sum().backward()
    model(volume).sum().backward()
    torch.testing.assert_close(seen[1], seen[0])


def test_an_input_of_a_sum_that_changed_in_place_is_refused(written_by_tiles: list[int]) -> None:
    class Changing(Residual):
        def forward(self, x: Tensor) -> Tensor:
            before = self.first(x)
            total = self.norm(before) + x.repeat([1, 2, 1, 1, 1])
            before.slabs[0].data.add_(1.0)
            torch.autograd.graph.increment_version(before.slabs[0])
            return self.head(torch.cat((total, total), 1))

    model = ModelParallel(Changing().double(), strategy=Spatial(checkpoint="tiled"), devices=["cpu"])
    with pytest.raises(UnsupportedOperatorError, match="changed in place"):
        model(torch.randn(1, 2, 20, 6, 8, dtype=torch.float64))
