"""Second derivatives are refused, never silently dropped."""

import inspect
import pkgutil
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import volseg
from volseg.device.first_order import first_order
from volseg.errors import UnsupportedOperatorError
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy
from volseg.parallel import ModelParallel

LOSSES = {
    "linear": lambda output: output.sum(),
    "quadratic": lambda output: output.square().mean(),
    "dice": lambda output: dice_cross_entropy(output, torch.zeros(1, 1, 8, 4, 4, dtype=torch.uint8), Terms()),
}
NETS = {
    "convolution": lambda: nn.Conv3d(1, 2, 3, padding=1),
    "norm": lambda: nn.Sequential(nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2), nn.ReLU()),
    "join": lambda: Joined(),
}


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(torch.cat([y, F.relu(y)], 1))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("net", NETS)
def test_second_derivatives_of_a_sharded_network_are_refused(net: str, loss: str) -> None:
    model = ModelParallel(NETS[net](), strategy="spatial", devices=["cpu"])
    x = torch.randn(1, 1, 8, 4, 4, requires_grad=True)
    value = LOSSES[loss](model(x))
    with pytest.raises(UnsupportedOperatorError, match="create_graph=True"):
        torch.autograd.grad(value, list(model.parameters()), create_graph=True)


def test_where_only_torch_computes_they_are_right() -> None:
    """Slabs of one process are convolved by torch's own functions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv3d(2, 1, 3, padding=1)).double()
    x = torch.randn(1, 1, 8, 4, 4, dtype=torch.float64)

    def twice(model: nn.Module) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True, materialize_grads=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()), allow_unused=True)

    expected = twice(net)
    for one, other in zip(twice(ModelParallel(net, strategy="spatial", devices=["cpu"] * 2)), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_first_derivatives_are_not() -> None:
    def double(ctx: object, gradient: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return 2 * gradient

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        backward = staticmethod(first_order(double))

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):  # gradients accumulate
        Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [4.0] * 3
    # Also where the loop around it has switched them on, as checkpointing does.
    with torch.enable_grad():
        Twice.apply(x).square().sum().backward()
    with pytest.raises(UnsupportedOperatorError, match="plain network"):
        Twice.apply(x).sum().backward(create_graph=True)


def test_every_function_of_ours_is_of_first_order() -> None:
    guarded = inspect.unwrap(first_order).__code__.co_consts
    found = []
    for module in pkgutil.walk_packages(volseg.__path__, "volseg."):
        if not module.name.startswith(("volseg.device.", "volseg.losses.", "volseg.parallel.spatial.")):
            continue
        for _, value in inspect.getmembers(import_module(module.name), inspect.isclass):
            if issubclass(value, torch.autograd.Function) and value.__module__ == module.name:
                found.append(value)
                assert value.backward.__code__ in guarded, value
    assert len(found) >= 10
