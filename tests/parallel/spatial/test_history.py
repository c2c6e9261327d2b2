"""Gradients flow where they would flow through the plain network, and nowhere else."""

import copy

import pytest
import torch
from torch import Tensor, nn

from volseg.parallel import ModelParallel


class JoinWithoutHistory(nn.Module):
    """Joins two levels under ``no_grad``; a gradient reaches them by another way only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.InstanceNorm3d(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv3d(3, 3, 3, padding=1), nn.InstanceNorm3d(3), nn.ReLU())
        self.behind = nn.Conv3d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a)
        with torch.no_grad():
            joined = torch.cat([a, b], 1)
        return self.behind(joined) + b


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("checkpoint", [None, "all"])
def test_a_join_under_no_grad_passes_no_gradient_on(shards: int, checkpoint: str | None) -> None:
    """The convolution behind it used to hand gradients to the joined volumes themselves, as it does with history."""
    plain = JoinWithoutHistory().double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=["cpu"] * shards, checkpoint=checkpoint)
    x = torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    plain(x).square().mean().backward()
    model(x).square().mean().backward()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
