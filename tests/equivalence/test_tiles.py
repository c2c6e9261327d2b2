"""Recomputed tile by tile equals the plain network: outputs, every gradient, buffers, steps; in float64.

Only sums of two element types are written by tiles, which float64 has none of: the rule that says so is switched off.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import spatial_cases as spatial
import torch
import torch.nn.functional as F
from beside_plain import WAYS, assert_no_coarser, assert_small, compare, measure_rounding, on_slabs
from in_group import in_group
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.convolution import plan, slab
from volseg.parallel.spatial.lazy import addition, norm
from volseg.parallel.spatial.operators import convolution

TILED = on_slabs(1, checkpoint="tiled")


@contextmanager
def small_tiles() -> Iterator[None]:
    """Cut the slabs of a test into as many tiles as they can be."""
    with patch.object(plan, "TILE_ELEMENTS", 64):
        yield


@contextmanager
def sums_of_any_type() -> Iterator[None]:
    with patch.object(addition, "has_fewer_digits", lambda *types: all(dtype.is_floating_point for dtype in types)):
        yield


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    with small_tiles():
        yield


@pytest.fixture
def counted() -> Iterator[dict[str, list[torch.dtype]]]:
    """Record the types of tiled convolutions' results, deferred transposed ones, and backward sums."""
    found: dict[str, list[torch.dtype]] = {"convolutions": [], "transposed": [], "sums": []}

    def noting(name: str, function: Callable) -> Callable:
        def note(*args: Any) -> Any:
            result = function(*args)
            tensors = args[1][:1] if name == "sums" else [result]
            found[name] += [tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)]
            return result

        return note

    with (
        patch.object(slab, "convolve_by_tiles", noting("convolutions", slab.convolve_by_tiles)),
        patch.object(convolution, "convolve_later", noting("transposed", convolution.convolve_later)),
        patch.object(norm, "_differentiate_in_tiles", noting("sums", norm._differentiate_in_tiles)),
    ):
        yield found


Counted = dict[str, list[torch.dtype]]


def run(name: str, **where: Any) -> dict[str, float]:
    """Return the errors of two steps of a case."""
    case = {**spatial.CASES, "vnet": spatial.VNET}[name]
    tiled = replace(case, steps=2, options={**case.options, "checkpoint": "tiled"})
    return spatial.run(tiled, **where)


CASES = {
    "channels last": (True, True),
    "dynunet all recomputed": (True, True),
    "dynunet residual anisotropic": (True, True),
    "segresnet deconv": (True, True),
    "segresnet": (True, False),
}
"""Cases, and whether convolutions and transposed ones are taken by tiles in them."""

OTHERS = [pytest.param(name, 1, marks=pytest.mark.slow) for name in sorted({*spatial.CASES, "vnet"} - set(CASES))]


@pytest.mark.parametrize(
    ("name", "shards"), [*((name, 2 if "all" in name or "last" in name else 1) for name in CASES), *OTHERS]
)
def test_a_network_by_tiles_equals_the_plain_one(name: str, shards: int, counted: Counted) -> None:
    assert_small(run(name, devices=["cpu"] * shards, fixed_order=shards > 1))
    assert name not in CASES or (bool(counted["convolutions"]), bool(counted["transposed"])) == CASES[name]


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


class Residual(nn.Module):
    """V-Net's finest level: the image is added to each channel, and joined with the result."""

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


class Sloped(nn.Module):
    """One PReLU for two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.prelu(x)


SUMS: dict[str, dict[str, Any]] = {
    "vnet": {"act": in_place},
    "instance": {"norm": lambda channels: nn.InstanceNorm3d(channels, affine=True)},
    "plain": {"norm": nn.InstanceNorm3d, "act": nn.Identity()},
    "group": {"norm": lambda channels: nn.GroupNorm(1, channels), "act": F.silu, "inner": F.gelu},
    "slopes inside": {"inner": Sloped()},
    "slopes behind": {"act": Sloped()},
}


def make_volume(samples: int = 1, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, channels, 20, 6, 8, dtype=torch.float64, generator=generator)


def check_tiled(plain: nn.Module, volume: Tensor, shards: int | None = 1, channels_last: bool = False) -> None:
    """Take two steps by tiles, and two of the plain network."""
    way = on_slabs(shards, checkpoint="tiled", fixed_order=shards != 1, channels_last=channels_last)
    assert_small(compare(copy.deepcopy(plain), way(copy.deepcopy(plain)), [volume], steps=2))


@pytest.mark.parametrize(
    ("name", "samples", "training"),
    [*((name, 1, True) for name in LEVELS), ("usual", 2, True), ("flat", 2, True), ("usual", 1, False)],
)
def test_a_level_by_tiles_equals_the_plain_one(name: str, samples: int, training: bool, counted: Counted) -> None:
    torch.manual_seed(7)
    plain = Level(**LEVELS[name]).double().train(training)
    for shards, channels_last in ((1, False), (1, True), (2, False)):
        check_tiled(plain, make_volume(samples), shards, channels_last)
        assert counted["convolutions"]
        assert counted["transposed"]
        counted["convolutions"], counted["transposed"] = [], []


@pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in SUMS), ("vnet", False), ("slopes inside", False)]
)
def test_a_level_with_sums_by_tiles_equals_the_plain_one(name: str, training: bool, counted: Counted) -> None:
    torch.manual_seed(7)
    plain = Residual(**SUMS[name]).double().train(training)
    with sums_of_any_type():
        for shards, channels_last, samples in ((1, False, 1), (1, True, 2), (2, True, 1)):
            check_tiled(plain, make_volume(samples, 2), shards, channels_last)
            assert counted["sums"]
            counted["sums"] = []


def check_in_process() -> None:
    torch.manual_seed(0)
    with small_tiles(), sums_of_any_type():
        check_tiled(Level(**LEVELS["usual"]).double(), make_volume(), None, channels_last=True)
        check_tiled(Level(**LEVELS["dilated"]).double(), make_volume(2), None)
        check_tiled(Residual(act=in_place).double(), make_volume(1, 2), None)


def test_processes_by_tiles_equal_one_device() -> None:
    in_group(2, check_in_process)


@pytest.mark.parametrize("frozen", [["first", "norm", "up", "way_up"], ["first"], ["norm"], ["high"], ["last"], ["up"]])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(frozen: list[str], counted: Counted) -> None:
    torch.manual_seed(7)
    plain = (Level(3) if len(frozen) > 1 else Residual()).double()
    for name in frozen:
        getattr(plain, name).requires_grad_(False)
    with sums_of_any_type():
        check_tiled(plain, make_volume(1, 1 if len(frozen) > 1 else 2))
    assert bool(counted["sums"]) == (len(frozen) == 1)


@pytest.mark.parametrize(
    ("make", "channels"), [(lambda: Level(3), 1), (lambda: Residual(act=in_place), 2)], ids=["level", "sums"]
)
def test_half_precision_is_as_near_to_float64_as_without_tiles(
    make: Callable[[], nn.Module], channels: int, counted: Counted
) -> None:
    """The weight's gradient is added up over tiles in float32: what it differs by is the rounding of what it reads.

    Under autocast V-Net's sums have two types; nothing is rounded that the plain network does not round.
    """
    torch.manual_seed(7)
    image = torch.randn(1, channels, 20, 16, 16)
    plain, whole, tiled = measure_rounding(make(), image, None, WAYS["one, recomputed"], TILED)
    assert counted["convolutions"]
    # The skip's gradient is float32, as in the plain network; the last sum's is the convolution's own.
    assert set(counted["sums"]) == ({torch.float32, torch.bfloat16} if channels == 2 else set())
    assert_no_coarser(tiled, plain, whole)


def test_a_hook_on_a_sum_by_tiles_gets_its_gradient_and_one_on_its_norm_is_refused() -> None:
    """The gradient bypassed the norm, whose hook was silently not called."""
    torch.manual_seed(7)
    seen: list[Tensor] = []

    class Hooked(Residual):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(self.first(x))
            total = F.elu(normed + x.repeat([1, 2, 1, 1, 1]))
            hooked = total if self.hooks_total else normed
            hooked.register_hook(lambda gradient: seen.append(getattr(gradient, "full_tensor", lambda: gradient)()))
            return self.way_up(torch.cat((total, total), 1))

    plain = Hooked().double()
    with sums_of_any_type():
        plain.hooks_total = True
        for net in (plain, TILED(copy.deepcopy(plain))):
            net(make_volume(1, 2)).sum().backward()
        torch.testing.assert_close(seen[1], seen[0])
        plain.hooks_total = False
        with pytest.raises(UnsupportedOperatorError, match="before the volume is used"):
            TILED(plain)(make_volume(1, 2))


@pytest.mark.parametrize("adds", [False, True])
def test_an_input_that_changed_in_place_is_refused_by_tiles(adds: bool) -> None:
    class Changing(Residual):
        def forward(self, x: Tensor) -> Tensor:
            before = self.first(x)
            total = self.norm(before) + x.repeat([1, 2, 1, 1, 1]) if adds else self.norm(before)
            result = None if adds else self.up(self.down(total))
            before.slabs[0].data.add_(1.0)
            torch.autograd.graph.increment_version(before.slabs[0])
            return self.head(torch.cat((total, total if result is None else result), 1))

    with sums_of_any_type(), pytest.raises(UnsupportedOperatorError, match="changed in place"):
        TILED(Changing().double())(make_volume(1, 2))
