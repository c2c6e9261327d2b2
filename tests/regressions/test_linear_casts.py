"""A linear layer on slabs cast all parameters under autocast; torch casts float32 weights, and a bias at each use."""

import pytest
import torch
from torch import Tensor, nn

from volseg.parallel import ModelParallel


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x))


def place(net: nn.Module, on_slabs: bool) -> nn.Module:
    return ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"]) if on_slabs else net


@pytest.mark.parametrize("on_slabs", [False, True])
def test_float64_weights_are_refused_under_autocast_as_by_torch(on_slabs: bool) -> None:
    net = place(nn.Linear(6, 3).double(), on_slabs)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
        net(torch.randn(1, 2, 8, 4, 6))


def test_a_layer_used_twice_sums_its_bias_gradient_in_float32() -> None:
    torch.manual_seed(0)
    net = Twice()
    image = torch.randn(1, 2, 64, 32, 6)
    with torch.autocast("cpu", torch.bfloat16):
        output = place(net, on_slabs=True)(image)
    (output.float().square().mean()).backward()
    found = net.linear.bias.grad
    assert found is not None
    assert not found.equal(found.to(torch.bfloat16).float()), "rounded to 16 bits"
