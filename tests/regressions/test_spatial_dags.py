"""What random networks on slabs found: each story ended in another number or a crash, and is equal since.

Everything is compared with the plain network in float64, on real copies: "cpu:1" is copied to as a second GPU is.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_plain import compare
from made_up_networks import WithLayers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel

DEVICES = [["cpu"], ["cpu", "cpu:1"]]
TOLERANCE = 1e-9


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def convolution() -> nn.Conv3d:
    return nn.Conv3d(2, 2, 3, padding=1, bias=False)


def assert_same(net: nn.Module, devices: list[str], **options: Any) -> None:
    """Two steps of training: outputs, every gradient, buffers and parameters are equal."""
    torch.manual_seed(0)
    model = ModelParallel(copy.deepcopy(net), strategy="spatial", devices=devices, **options)
    errors = compare(net, model, [torch.randn(2, 2, 9, 4, 4, dtype=torch.float64)], steps=2)
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong


# --- torch's checkpoint in the network's own code -----------------------------------------------------------------

ENDS: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [nn.BatchNorm3d(2)],
    "batch norm and activation": lambda: [nn.BatchNorm3d(2), nn.ReLU(inplace=True)],
    "tracked instance norm": lambda: [nn.InstanceNorm3d(2, track_running_stats=True)],
    "counter and instance norm": lambda: [Counter(), nn.InstanceNorm3d(2)],
    "counter and group norm": lambda: [Counter(), nn.GroupNorm(1, 2), nn.LeakyReLU()],
}


@pytest.mark.parametrize("options", [{}, {"checkpoint": "all"}], ids=["", "checkpoint=all"])
@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("end", ENDS)
def test_a_checkpointed_block_that_ends_in_a_norm(end: str, devices: list[str], options: dict[str, str]) -> None:
    """The norm was computed behind the block, the recomputation stopped before it, and buffers changed once less often
    than torch changes them."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["last"](checkpoint(layers["block"], x, use_reentrant=False))

    block = nn.Sequential(convolution(), nn.LeakyReLU(), convolution(), *ENDS[end]())
    assert_same(WithLayers(forward, block=block, last=convolution()).double(), devices, **options)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_checkpoint_in_a_checkpoint(devices: list[str]) -> None:
    """A norm of the outer block was computed in the inner one: torch missed its tensors in the recomputation."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        def outer(y: Tensor) -> Tensor:
            return checkpoint(layers["block"], layers["block"](y), use_reentrant=False)

        return layers["last"](checkpoint(outer, x, use_reentrant=False))

    block = nn.Sequential(convolution(), nn.BatchNorm3d(2), nn.ReLU())
    assert_same(WithLayers(forward, block=block, last=convolution()).double(), devices)


# --- copied views -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_the_shape_of_a_copied_view(devices: list[str]) -> None:
    """A plane across the cut is an ordinary tensor that is a copy: its shape was a tuple, without ``numel()``."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        plane = x[:, :, 3]
        assert isinstance(plane.shape, torch.Size)
        return layers["a"](x) * plane.mean() / plane.shape.numel()

    assert_same(WithLayers(forward, a=convolution()).double(), devices)


# --- the backward pass from a volume ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_backward_from_a_volume_through_a_recomputed_block(devices: list[str], how: str) -> None:
    """``output.backward(gradient)`` computed blocks again where no function of torch reached the slabs: refused."""
    torch.manual_seed(0)
    plain = nn.Sequential(convolution(), nn.BatchNorm3d(2), nn.ReLU(), convolution()).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices, checkpoint="all")
    volume, gradient = (torch.randn(2, 2, 9, 4, 4, dtype=torch.float64) for _ in range(2))
    found = []
    for net in (plain, model):
        output, parameters = net(volume), list(net.parameters())
        if how == "autograd.grad":
            found.append(torch.autograd.grad(output, parameters, gradient))
            continue
        output.backward(gradient) if how == "backward" else torch.autograd.backward(output, gradient)
        found.append(tuple(parameter.grad for parameter in parameters))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


# --- memory that lies otherwise than the whole volume's -----------------------------------------------------------


def test_contiguous_without_gradients() -> None:
    """torch returns what is contiguous itself, with its history even under no_grad; slabs with channels last were
    copied there, and the gradient through them was lost. Refused, where the volume has a history to lose."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        with torch.no_grad():
            same = y.contiguous()
        return layers["a"](same * y)

    net = WithLayers(forward, a=convolution()).double()
    assert_same(net, ["cpu"])
    with pytest.raises(UnsupportedOperatorError, match=r"detach\(\)"):
        assert_same(net, ["cpu"], channels_last=True)


@pytest.mark.parametrize("read", [lambda plane: plane, lambda plane: plane * 1], ids=["returned", "read"])
def test_a_copied_view_of_what_has_changed_since(read: Callable[[Tensor], Tensor]) -> None:
    """A plane is taken, then the volume is doubled: returned from the network, the plane had the old values."""

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        y = layers["a"](x)
        plane = y[:, :, 3]
        y.mul_(2)
        return read(plane)

    model = ModelParallel(WithLayers(forward, a=convolution()), strategy="spatial", devices=["cpu", "cpu:1"], axes="D")
    with pytest.raises(UnsupportedOperatorError, match="changed in place after a slice"):
        model(torch.randn(1, 2, 9, 4, 4))


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_batch_of_no_samples_and_a_volume_without_a_batch(devices: list[str]) -> None:
    """Batch norm of no samples failed with an IndexError, and one shard convolved no volume without a batch."""
    model = ModelParallel(nn.BatchNorm3d(2), strategy="spatial", devices=devices)
    with pytest.raises(UnsupportedOperatorError, match="no samples"):
        model(torch.zeros(0, 2, 9, 4, 4))
    plain = nn.Conv3d(2, 3, 3, padding=1).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices)
    volume = torch.randn(2, 9, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(model(volume).full_tensor(), plain(volume))


# --- the gradient of a join ----------------------------------------------------------------------------------------


class Joins(nn.Module):
    """Joins two volumes, asks for the gradient of the join, and convolves it; or the other way round."""

    def __init__(self, ask: Callable[[Tensor], object], late: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = convolution(), convolution(), nn.Conv3d(4, 2, 3, padding=1)
        self.ask, self.late = ask, late

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(nn.functional.instance_norm(self.first(x)))
        self.join = torch.cat([skip, self.second(skip)], 1)
        if not self.late:
            self.ask(self.join)
        result = self.last(self.join)
        if self.late:
            self.ask(self.join)
        return result


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_join_has_the_gradient_that_a_convolution_gives_it(devices: list[str]) -> None:
    """The convolution gave the joined volumes their gradients, and the join none: a hook changed nothing."""
    assert_same(Joins(lambda join: join.register_hook(lambda gradient: gradient * 3), late=False).double(), devices)
    plain = Joins(lambda join: join.retain_grad(), late=False).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices)
    x = torch.randn(1, 2, 9, 4, 4, dtype=torch.float64)
    for net in (plain, model):
        net(x).sin().sum().backward()
    torch.testing.assert_close(model.module.join.grad.full_tensor(), plain.join.grad)


@pytest.mark.parametrize(
    "ask",
    [
        lambda join: join.register_hook(lambda gradient: gradient * 3),
        lambda join: join.retain_grad(),
        lambda join: torch.autograd.grad(join.sum(), join),
    ],
    ids=["hook", "retain_grad", "autograd.grad"],
)
def test_the_gradient_of_a_join_that_went_past_it_is_refused(ask: Callable[[Tensor], object]) -> None:
    """Without a word it was that of everything but the convolution."""
    model = ModelParallel(Joins(ask, late=True).double(), strategy="spatial", devices=["cpu"])
    with pytest.raises(UnsupportedOperatorError, match="before the volume is used"):
        model(torch.randn(1, 2, 9, 4, 4, dtype=torch.float64))
