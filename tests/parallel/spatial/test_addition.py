"""Sums fused with norms, against the plain network in float64: outputs, every gradient, buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, RunLayers, check_beside_plain, measure_rounding
from torch import Tensor, nn

from volseg.device import fusions
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.lazy.addition import WaitingSum
from volseg.parallel.spatial.transport.halo import Halo

Sum = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Two norms, and operations on them."""

    def __init__(self, norm: Callable[[int], nn.Module], combine: Sum) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 6, 3, padding=1), nn.Conv3d(2, 6, 1)
        self.norm, self.other = norm(6), norm(6)
        self.slope = nn.Parameter(torch.rand(6))
        self.last = nn.Conv3d(6, 2, 3, padding=1)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.combine(self, x))
        return result


def add_in_place(net: Block, x: Tensor) -> Tensor:
    out = net.norm(net.first(x))
    out += net.second(x)
    return F.leaky_relu(out, 0.1, inplace=True)


def add_again(net: Block, x: Tensor) -> Tensor:
    normed = net.norm(net.first(x))
    total = normed + net.second(x)
    return F.relu(total) * normed


def change_behind(net: Block, x: Tensor) -> Tensor:
    other = net.second(x)
    total = net.norm(net.first(x)) + other
    other = other.add_(1.0) if not torch.is_grad_enabled() else other + 1.0
    return F.elu(total) + other


def freeze_in_between(net: Block, x: Tensor) -> Tensor:
    """One norm in both terms of a sum: frozen before the sum is read, and frozen in one of the terms."""
    weight = net.norm.weight
    total = net.norm(net.first(x)) + net.norm(net.second(x))
    part = net.norm(net.first(x) + net.second(x))
    weight.requires_grad_(False)
    result = F.relu(total) * F.relu(part + net.norm(net.second(x).square()))
    weight.requires_grad_(True)
    return result


SUMS: dict[str, Sum] = {
    "norm + norm, leaky": lambda net, x: F.leaky_relu(net.norm(net.first(x)) + net.other(net.second(x)), 0.1),
    "norm + slab, elu": lambda net, x: F.elu(net.norm(net.first(x)) + net.second(x)),
    "slab + activated norm": lambda net, x: net.second(x) + F.relu(net.norm(net.first(x))),
    "prelu(norm) + gelu(norm), silu": lambda net, x: F.silu(
        F.prelu(net.norm(net.first(x)), net.slope) + F.gelu(net.other(net.second(x)))
    ),
    "prelu(norm) + slab": lambda net, x: torch.add(F.prelu(net.norm(net.first(x)), net.slope[:1]), net.second(x)),
    "sigmoid of both, prelu": lambda net, x: F.prelu(
        torch.sigmoid(net.norm(net.first(x))) + net.other(net.second(x)), net.slope
    ),
    "in place": add_in_place,
    "one norm twice": add_again,
    "changed behind": change_behind,
    "one norm, frozen in between": freeze_in_between,
}

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "batch": nn.BatchNorm3d,
    "batch without running": lambda channels: nn.BatchNorm3d(channels, track_running_stats=False),
    "batch, cumulative": lambda channels: nn.BatchNorm3d(channels, momentum=None, affine=False),
    "group": lambda channels: nn.GroupNorm(2, channels),
}


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("combine", SUMS)
@pytest.mark.parametrize("norm", ["instance", "group"])
def test_sums_are_exact(combine: str, norm: str, way: str) -> None:
    torch.manual_seed(0)
    image = torch.rand(2, 2, 34, 3, 5, dtype=torch.float64)
    check_beside_plain(Block(NORMS[norm], SUMS[combine]).double(), WAYS[way], image, steps=1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_in_sums_are_exact(norm: str, training: bool) -> None:
    torch.manual_seed(0)
    plain = Block(NORMS[norm], SUMS["norm + norm, leaky"]).double()
    plain(torch.rand(2, 2, 5, 4, 3, dtype=torch.float64))  # running statistics that are no start's
    check_beside_plain(plain.train(training), WAYS["one"], torch.rand(3, 2, 5, 4, 3, dtype=torch.float64))


class Mixed(nn.Module):
    """A sum of a norm and another value in two types, or both in float64 as the reference."""

    def __init__(self, combine: Callable[["Mixed", Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1, bias=False)  # which a norm behind would take away
        self.norm, self.other = nn.InstanceNorm3d(4, affine=True), nn.GroupNorm(2, 4)
        self.slope = nn.Parameter(torch.rand(4))
        self.last = nn.Conv3d(4, 2, 3, padding=1)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        half = x if x.dtype == torch.float64 else x.bfloat16()
        result: Tensor = self.last(self.combine(self, half, self.conv(x), x))
        return result


def repeat(x: Tensor) -> Tensor:
    """Return the first channel four times, as V-Net repeats its image: it needs no gradient."""
    return x.detach()[:, :1].repeat(1, 4, 1, 1, 1)


def add_image_that_changes(net: Mixed, half: Tensor, wide: Tensor, x: Tensor) -> Tensor:
    image = x.detach()[:, :1].clone()
    repeated = image.repeat(1, 4, 1, 1, 1)
    image += 1.0
    return F.elu(net.norm(wide) + repeated) * image


MIXED: dict[str, Callable[[Mixed, Tensor, Tensor, Tensor], Tensor]] = {
    "half norm + slab, elu": lambda net, half, wide, x: F.elu(net.norm(half) + wide),
    "slab + half norm, elu in place": lambda net, half, wide, x: F.elu(wide + net.norm(half), inplace=True),
    "half norm + slab": lambda net, half, wide, x: net.norm(half) + wide,
    "half norm + what needs no gradient": lambda net, half, wide, x: F.elu(net.norm(half) + x.detach()) + wide,
    "half norm + image, elu": lambda net, half, wide, x: F.elu(net.norm(half) + repeat(x)) * wide,
    "image + norm, elu": lambda net, half, wide, x: F.elu(repeat(x) + net.norm(wide)) + repeat(x),
    "norm + image changed behind, elu": add_image_that_changes,
    "norm + half slab": lambda net, half, wide, x: net.norm(wide) + half,
    "norm + half slab, leaky": lambda net, half, wide, x: F.leaky_relu(net.norm(wide) + half, 0.2),
    "half norm + norm, silu": lambda net, half, wide, x: F.silu(F.prelu(net.norm(half), net.slope) + net.other(wide)),
    "norm + half norm": lambda net, half, wide, x: F.relu(net.other(wide)) + F.relu(net.norm(half)),
}


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("combine", MIXED)
def test_sums_of_two_types_are_float32_and_exact(combine: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = Mixed(MIXED[combine])
    # What half precision holds, and one more does too, so that nothing is rounded before the norm.
    x = (torch.randint(128, (2, 4, 34, 3, 5)) / 128).requires_grad_()
    summed: list[torch.dtype] = []

    def note(waiting: WaitingSum, halos: Sequence[Halo]) -> Any:
        written = write(waiting, halos)
        assert [slab.dtype for slab in waiting.stand_ins] == [slab.dtype for slab in written[0]]
        summed.append(written[0][0].dtype)
        return written

    write = WaitingSum.write
    monkeypatch.setattr(WaitingSum, "write", note)
    (errors,) = measure_rounding(plain, x, WAYS[way], dtype=None)
    assert summed == [torch.float32]
    assert errors.pop("image") < 2**-7  # it comes through the half-precision slab
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


def test_a_sum_reads_an_image_that_is_repeated_where_it_lies() -> None:
    seen: list[tuple[str, int]] = []

    def add(net: Mixed, half: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        repeated: Any = repeat(x)
        total: Any = net.norm(half) + repeated
        seen.append((type(repeated.pending).__name__, total.pending.columns[1][0].stride(1)))
        return F.elu(total)

    torch.manual_seed(0)
    WAYS["two"](Mixed(add))(torch.rand(1, 4, 34, 3, 5))
    assert seen == [("WaitingRepeat", 0)]


def test_a_sum_in_place_keeps_the_type_of_what_is_changed() -> None:
    def change(net: Mixed, half: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        out = net.norm(half)
        out += wide
        assert out.dtype == half.dtype
        return out.float()

    torch.manual_seed(0)
    net = Mixed(change)
    WAYS["two"](net)(torch.rand(1, 4, 34, 3, 5))


@pytest.mark.parametrize("channels", [1, 7, 130])
def test_channels_of_any_number(channels: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(2, channels, 1), nn.BatchNorm3d(channels), nn.PReLU(channels)).double()
    check_beside_plain(plain, WAYS["one"], torch.rand(2, 2, 3, 5, 1, dtype=torch.float64))


def test_a_sum_waits_for_its_activation() -> None:
    kinds: list[str] = []

    def spy(net: Any, x: Any) -> Any:
        features = net.conv(x)
        total = net.norm(features) + features
        kinds.append(type(total.pending).__name__)
        result = F.leaky_relu(total)
        kinds.append(type(result.pending).__name__)
        with torch.no_grad():
            kinds.append(type((net.norm(features) + features).pending).__name__)
        norm = net.norm(features)
        with torch.no_grad():
            kinds.append(type((norm + features).pending).__name__)
        return result

    net = WAYS["one"](RunLayers(spy, conv=nn.Conv3d(1, 4, 1), norm=nn.InstanceNorm3d(4)))
    x = torch.rand(1, 1, 4, 4, 4)
    net(x)
    # A norm of another mode is written as it was, first.
    assert kinds[:3] == ["WaitingSum"] * 3
    assert kinds[3] != "WaitingSum"
    kinds.clear()
    with fusions.without("sums"):
        net(x)
    assert "WaitingSum" not in kinds


@pytest.mark.parametrize("ask", [lambda y: y.register_hook(print), lambda y: y.retain_grad()], ids=["hook", "kept"])
@pytest.mark.parametrize(
    "use",
    [
        lambda y, other: y + other,
        lambda y, other: other.add_(y),
        lambda y, other: F.relu(y),
        lambda y, other: F.prelu(y, torch.ones(1)),
    ],
    ids=["sum", "sum in place", "activation", "prelu"],
)
def test_a_hook_that_nobody_would_call_is_refused(use: Callable[..., Any], ask: Callable[[Any], object]) -> None:
    """The gradient goes past a norm that was included, so that the hook was never called."""

    def run(net: Any, x: Any) -> Any:
        y = net.norm(x * 2)
        used = use(y, net.norm(x))
        ask(y)
        return used

    with pytest.raises(UnsupportedOperatorError, match="before the volume is used"):
        WAYS["one"](RunLayers(run, norm=nn.InstanceNorm3d(1)))(torch.rand(1, 1, 4, 4, 4, requires_grad=True))


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
def test_with_all_fusions_off_it_is_the_same(norm: str) -> None:
    torch.manual_seed(0)
    plain = Block(NORMS[norm], SUMS["prelu(norm) + gelu(norm), silu"]).double()
    with fusions.without(*fusions.NAMES):
        check_beside_plain(plain, WAYS["one"], torch.rand(2, 2, 5, 4, 3, dtype=torch.float64))
