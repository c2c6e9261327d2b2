"""The changes of an attempt are undone."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from volseg.errors import ParallelError
from volseg.parallel.state.recorded import Attempt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(2, 2), nn.BatchNorm1d(2), 0


def numbers() -> tuple:
    """Return the states of the generators of torch, Python and NumPy."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), position


def fail_after_changes(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.calls, net.linear.weight.grad, net.linear.bias.grad = 7, None, torch.ones(2)
    net.norm.running_mean.add_(1)
    net.linear.weight.data.mul_(2)
    optimizer.param_groups[0]["lr"] = 5.0
    optimizer.state[net.linear.weight]["momentum_buffer"].add_(1)
    torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    raise ZeroDivisionError


def test_an_attempt_is_undone_at_its_end_also_where_it_fails() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.linear.weight.grad = gradient = torch.ones(2, 2)
    optimizer.step()
    weight = net.linear.weight
    value, before = weight.detach().clone(), numbers()
    with pytest.raises(ZeroDivisionError), Attempt(net, written=[weight], optimizer=optimizer):
        fail_after_changes(net, optimizer)
    assert net.calls == 0
    assert net.linear.weight.grad is gradient
    assert net.linear.bias.grad is None
    assert net.norm.running_mean.tolist() == [0, 0]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], gradient)
    assert torch.equal(weight, value)
    assert numbers() == before


def test_what_cannot_be_undone_is_refused_and_random_numbers_are_put_back_even_then() -> None:
    net, state = Net(), torch.get_rng_state()
    attempt = Attempt(net)
    torch.rand(1)
    with torch.no_grad():
        net.linear.weight.add_(1)
    with pytest.raises(ParallelError, match="a parameter among weight, bias of Linear was changed in place"):
        attempt.put_back()
    assert torch.equal(torch.get_rng_state(), state)
