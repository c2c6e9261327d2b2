"""Replicas of a pipeline: ``DistributedDataParallel`` around ``ModelParallel``, two processes over gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(torch.relu(self.norm(self.b(first)))) + first


def train(record: bool) -> None:
    """Compare this rank's weights after some steps with those of one plain network on the whole batch."""
    torch.manual_seed(0)
    net = Net().double()
    plain = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * 3, split_size=1, record=record)
    x = torch.randn(4, 2, 4, 4, 4, dtype=torch.float64)
    own = x.tensor_split(WORLD)[dist.get_rank()]
    model.strategy.plan(own)
    replica = nn.parallel.DistributedDataParallel(model)
    ours = torch.optim.SGD(replica.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(6):
        for module, optimizer, batch in ((replica, ours, own), (plain, theirs, x)):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    # Means of halves are averaged in another order than the mean of the whole.
    torch.testing.assert_close(dict(net.named_parameters()), dict(plain.named_parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("record", [False, True])
def test_replicas_of_a_pipeline_train_as_one_network(record: bool) -> None:
    in_group(WORLD, train, record)
