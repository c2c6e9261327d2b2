"""Convolutions whose slabs receive neighbours' planes equal those on one device, without extra work.

Transposed ones, and those whose large gradients have no room: what the neighbours' planes add to these comes apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, Counted, RunLayers, assert_no_coarser, measure_rounding, name_cpus
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel, verify
from volseg.parallel.spatial.convolution import around
from volseg.parallel.spatial.convolution import slab as slabs


class Case(NamedTuple):
    """A transposed convolution of so many planes."""

    kernel: int
    stride: int
    padding: int
    extra: int
    dilation: int = 1
    planes: int = 12
    shards: int = 2
    direct: bool = True
    """Whether it takes the passage past the general exchange."""


CASES = [
    Case(3, 2, 1, 1),
    Case(3, 2, 1, 1, shards=3),
    Case(3, 2, 1, 0, planes=13),
    Case(4, 2, 1, 0),
    Case(4, 2, 1, 0, shards=3),
    Case(5, 2, 2, 1),
    Case(7, 2, 3, 1, shards=3),
    Case(5, 3, 1, 0),
    Case(3, 1, 1, 0),
    Case(3, 1, 0, 0, dilation=2),
    Case(3, 2, 1, 1, dilation=2, planes=13),
    Case(2, 2, 0, 0, direct=False),  # no shard needs a neighbour's planes
    Case(1, 2, 0, 1, direct=False),  # nor here, where some planes hold the bias alone
    Case(3, 2, 1, 1, planes=13, direct=False),  # slabs differ
]


class Net(nn.Module):
    """A transposed convolution between deferred operators.

    With ``kernel``, residual blocks of this kernel come first: the gradients of their sums have no room.
    """

    def __init__(
        self, case: Case, front: str = "norm", behind: str = "norm", groups: int = 1, kernel: int | None = None
    ) -> None:
        super().__init__()
        self.kernel = kernel
        if kernel is not None:
            options = {"padding": kernel // 2, "groups": groups}
            self.inner, self.joined = nn.Conv3d(4, 4, kernel, **options), nn.Conv3d(8, 4, kernel, **options)
        self.first, self.norm = nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)
        channels = 8 if front == "join" else 4
        self.up = nn.ConvTranspose3d(
            channels, 4, case.kernel, case.stride, case.padding, case.extra, groups, behind != "no bias", case.dilation
        )
        self.other, self.last = nn.BatchNorm3d(4), nn.Conv3d(4, 2, 3, padding=1)
        self.front, self.behind = front, behind

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        if self.kernel is not None:
            found = self.inner(F.relu(self.norm(found))) + found
            found = self.joined(torch.cat([F.relu(self.norm(found)), found], 1)) + found
        if self.front == "norm":
            found = F.leaky_relu(self.norm(found))
        elif self.front == "join":
            found = torch.cat([found, F.relu(self.norm(found))], 1)
        elif self.front == "sum":
            found = F.relu(self.norm(found)) + found
        found = self.up(found)
        found = F.relu(self.other(found)) if self.behind != "sum" else found + found.flip(3)
        result: Tensor = self.last(found)
        return result


def count_direct(run: Callable[[], object]) -> int:
    """Return the number of gradients of a transposed convolution that used the direct path."""
    with mock.patch.object(slabs, "_derive_transposed", wraps=slabs._derive_transposed) as derived:
        run()
    return derived.call_count


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slabs_equal_one_device(case: Case, fixed_order: bool) -> None:
    """In training, recomputed and evaluated, two steps of each; in no fixed order slabs of a process go another way."""
    torch.manual_seed(0)
    net, shape = Net(case), (2, 2, case.planes, 5, 4)
    options = {"axes": "D", "fixed_order": fixed_order}
    found: list = []
    counted = count_direct(lambda: found.append(verify(net, shape, name_cpus(case.shards), **options)))
    assert found[0].ok, str(found[0])
    assert (counted > 0) == (case.direct and fixed_order)


FRONTS, BEHIND, GROUPS = ("norm", "join", "sum", "convolution"), ("norm", "no bias", "sum"), (1, 2, 4)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("front", "behind", "groups"),
    # Every two values meet.
    [(front, behind, GROUPS[(i + j) % 3]) for i, front in enumerate(FRONTS) for j, behind in enumerate(BEHIND)],
)
def test_any_layer_in_front_and_behind(
    front: str, behind: str, groups: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where biases wait for norms, as on a GPU."""
    monkeypatch.setattr("volseg.parallel.spatial.lazy.bias.torch_adds_apart", lambda slab: waits)
    torch.manual_seed(0)
    net = Net(Case(3, 2, 1, 1), front, behind, groups)
    report = verify(net, (1, 2, 8, 4, 4), name_cpus(2), axes="D", fixed_order=True)
    assert report.ok, str(report)


def verified(case: Case, front: str, behind: str) -> tuple[str, int]:
    """Compare in each process; return differences, and how often the direct path was used."""
    torch.manual_seed(0)
    net = Net(case, front, behind)
    found: list = []
    counted = count_direct(lambda: found.append(verify(net, (2, 2, case.planes, 4, 4), axes="D")))
    return "" if found[0].ok else str(found[0]), counted


@pytest.mark.parametrize("front", ["norm", "join", "sum"])
@pytest.mark.parametrize("case", [Case(3, 2, 1, 1), Case(4, 2, 1, 0), Case(5, 2, 2, 1), CASES[-1]], ids=str)
def test_slabs_of_processes_equal_one_device(case: Case, front: str) -> None:
    for fault, counted in in_group(2, verified, case, front, "norm"):
        assert not fault
        assert (counted > 0) == case.direct


def verify_apart(net: nn.Module, planes: int, large: int, shards: int | None) -> tuple[str, int]:
    """Compare with one device; return differences, and the number of planes sent separately.

    Slabs of ``large`` bytes and more are large.
    """
    add = around.SurroundedGradients._add_edge
    devices = None if shards is None else name_cpus(shards)
    with (
        mock.patch.object(around, "LARGE", large),
        mock.patch.object(around.SurroundedGradients, "_add_edge", autospec=True, side_effect=add) as added,
    ):
        report = verify(net, (2, 2, planes, 4, 4), devices, axes="D", fixed_order=True)
    return "" if report.ok else str(report), added.call_count


UPS = [Case(3, 2, 1, 1), Case(4, 2, 1, 0), Case(5, 2, 2, 1), Case(7, 2, 3, 1), Case(3, 1, 1, 0)]


@pytest.mark.parametrize(
    ("case", "kernel", "planes", "shards", "groups"),
    [
        *((case, 3, planes, shards, 1) for case in UPS for planes, shards in ((8, 2), (9, 3))),
        *((UPS[index], kernel, 12, 2, 4) for index, kernel in ((0, 3), (1, 3), (2, 5), (4, 5))),
    ],
)
def test_gradients_of_large_slabs_equal_one_device(
    case: Case, kernel: int, planes: int, shards: int, groups: int
) -> None:
    torch.manual_seed(0)
    fault, added = verify_apart(Net(case, "convolution", "sum", groups, kernel), planes, 0, shards)
    assert not fault
    assert added > 0


def verify_in_process(case: Case, large: tuple[int, int]) -> tuple[str, int]:
    torch.manual_seed(0)
    return verify_apart(Net(case, "convolution", "sum", kernel=3), 8, large[torch.distributed.get_rank()], None)


SMALL = around.LARGE


@pytest.mark.parametrize(
    ("case", "large"),
    # A small slab is copied between the planes. Processes may decide differently: a slab's room is its own matter.
    [*((case, (0, 0)) for case in UPS[:3]), (UPS[0], (SMALL, SMALL)), (UPS[0], (SMALL, 0))],
)
def test_gradients_of_large_slabs_of_processes(case: Case, large: tuple[int, int]) -> None:
    for (fault, added), own in zip(in_group(2, verify_in_process, case, large), large, strict=True):
        assert not fault
        assert (added > 0) == (own == 0)


def rounded() -> list[dict[str, float]]:
    """Return the errors of slabs and of the plain network under autocast."""
    torch.manual_seed(0)
    return measure_rounding(Net(Case(3, 2, 1, 1)), torch.randn(2, 2, 8, 6, 4), WAYS["processes"], None)


def test_half_precision_is_as_exact_as_torch() -> None:
    for ours, plain in in_group(2, rounded):
        assert_no_coarser(ours, plain)


def build(change: bool = False) -> tuple[nn.Module, Tensor]:
    def run(net: Any, x: Tensor) -> Tensor:
        found = net.first(x)
        result: Tensor = net.up(found)
        if change:
            found.mul_(2)
        return result

    plain = RunLayers(run, first=nn.Conv3d(1, 2, 1), up=nn.ConvTranspose3d(2, 2, 3, 2, 1, 1))
    net = ModelParallel(plain, strategy="spatial", devices=["cpu", "cpu:1"], axes="D", fixed_order=True)
    return net, torch.randn(1, 1, 8, 4, 4, requires_grad=True)


def test_the_output_may_be_changed_in_place_and_the_input_may_not() -> None:
    net, x = build(change=True)
    output = net(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.full_tensor().sum().backward()
    net, x = build()
    output = net(x)
    wanted = net(x).full_tensor().relu()
    F.relu(output, inplace=True)
    torch.testing.assert_close(output.full_tensor(), wanted)
    output.full_tensor().sum().backward()


def test_only_what_is_asked_for() -> None:
    """A frozen weight, or an input that needs no gradient, leaves the other's as it was."""
    for frozen in ("weight", "bias", "input"):
        net, x = build()
        first, up = net.module.first, net.module.up
        net(x).full_tensor().square().sum().backward()
        wanted = {"weight": up.weight.grad, "bias": up.bias.grad, "input": first.weight.grad}
        for parameter in (*up.parameters(), *first.parameters()):
            parameter.grad = None
        if frozen == "input":
            first.requires_grad_(False)
            x = x.detach()
        else:
            getattr(up, frozen).requires_grad_(False)
        net(x).full_tensor().square().sum().backward()
        found = {"weight": up.weight.grad, "bias": up.bias.grad, "input": first.weight.grad}
        assert found[frozen] is None
        for name in found.keys() - {frozen}:
            torch.testing.assert_close(found[name], wanted[name])


def test_nothing_is_cropped_or_joined() -> None:
    """In both directions the operators are those of the slab's own planes, and of the planes around them."""
    net, x = build()
    with Counted(ndim=5) as counted:
        net(x.detach())._slabs[0].sum().backward()
    assert "convolution" in counted.names
    assert not {"cat", "slice_backward", "constant_pad_nd"} & set(counted.names)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("planes", [8, 9])
def test_what_came_without_gradients_may_be_changed_in_place_with_them(planes: int, fixed_order: bool) -> None:
    """It was a view of more planes, which torch does not let users change with gradients on."""

    def change(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = net.up(x)
        return found.mul_(net.scale)

    torch.manual_seed(0)
    net = RunLayers(change, up=nn.ConvTranspose3d(1, 2, 3, 2, 1, 1), scale=nn.Parameter(torch.ones(())))
    report = verify(net, (1, 1, planes, 4, 4), name_cpus(2), axes="D", fixed_order=fixed_order)
    assert report.ok, str(report)
