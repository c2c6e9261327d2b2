"""What random networks found where each process holds one slab: a process that waits for another one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_plain import RunLayers, compare
from in_group import assert_all_well, in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import TOLERANCE


def make_net(function: Callable[[nn.Module, Tensor], Any]) -> nn.Module:
    """Return a convolution, and a function of it and the input as ``forward``."""
    torch.manual_seed(0)
    return RunLayers(lambda net, x: function(net.layer, x), layer=nn.Conv3d(2, 2, 3, padding=1)).double()


def volume() -> Tensor:
    return torch.randn(1, 2, 12, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def assigned(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x) * 1.0
    y[:, :, 0:1] = layer(x)[:, :, -1:] * layer.bias.sum()
    return y


def assign_planes_of_one_process() -> None:
    """The planes fell to one process, whose backward pass waited for ever for the other's part of their gradient."""
    plain = make_net(assigned)
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial")
    errors = compare(plain, model, [volume()])
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong


def change_the_input_of_one_process() -> None:
    """The network zeroes a plane of its input, which only its owner noticed: it waited to write the caller's tensor."""

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        x[:, :, 0] = 0
        return layer(x)

    plain = make_net(forward)
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial")
    inputs = [volume(), volume()]
    outputs = [net(x) for net, x in zip((plain, model), inputs, strict=True)]
    torch.testing.assert_close(outputs[1].full_tensor(), outputs[0])
    torch.testing.assert_close(inputs[1], inputs[0])


CASES = {case.__name__: case for case in (assign_planes_of_one_process, change_the_input_of_one_process)}


@pytest.mark.parametrize("name", CASES)
def test_processes(name: str) -> None:
    assert_all_well(in_group(2, CASES[name]))
