"""Tensors that are moved together stay the same objects, with the same values."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import nn

from volseg.device import gpus
from volseg.device.gpus import move_together


@pytest.fixture
def emptied() -> Iterator[list[torch.device]]:
    """Take the CPU for a GPU, and note when its memory is given back."""
    found: list[torch.device] = []
    with patch.object(gpus, "on_gpu", lambda tensor: True), patch.object(gpus, "empty_cache", found.append):
        yield found


def test_an_optimizer_goes_on_after_its_state_was_moved(emptied: list[torch.device]) -> None:
    def train(moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Conv3d(1, 4, 3).to(memory_format=torch.channels_last_3d)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(1, 1, 5, 5, 5)).square().mean().backward()
            if moves and step == 2:
                states = [value for state in optimizer.state.values() for value in state.values()]
                given = [*states, *(parameter.grad for parameter in net.parameters())]
                before = [(id(tensor), tensor.data_ptr(), tensor.clone(), tensor.stride()) for tensor in given]
                move_together([*given, *given])
                for tensor, (number, place, value, stride) in zip(given, before, strict=True):
                    assert id(tensor) == number
                    assert tensor.data_ptr() != place
                    assert tensor.stride() == stride
                    torch.testing.assert_close(tensor, value, rtol=0, atol=0)
            optimizer.step()
        return list(net.parameters())

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)
    assert emptied == [torch.device("cpu")]


def test_memory_that_others_use_stays_where_it_is(emptied: list[torch.device]) -> None:
    bucket = torch.arange(8.0)
    whole, alone = torch.zeros(4), torch.ones(4)
    view = whole.view(2, 2)
    given = [bucket[:4], bucket[4:], whole, alone]
    places = [tensor.data_ptr() for tensor in given]
    move_together(given)
    assert [tensor.data_ptr() == place for tensor, place in zip(given, places, strict=True)] == [True] * 3 + [False]
    whole.add_(1)
    assert view.equal(torch.ones(2, 2))
    assert len(emptied) == 1


def test_nothing_is_given_back_where_nothing_moves(emptied: list[torch.device]) -> None:
    bucket = torch.zeros(8)
    move_together([bucket[:4]])
    assert not emptied
    with patch.object(gpus, "on_gpu", lambda tensor: False):
        move_together([torch.zeros(4)])
    assert not emptied
