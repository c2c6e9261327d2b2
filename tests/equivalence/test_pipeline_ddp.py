"""Replicas of a pipeline: ``DistributedDataParallel`` around ``ModelParallel``, two processes over gloo."""

import copy
import os
import subprocess
import sys

import torch
from torch import Tensor, nn

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(torch.relu(self.norm(self.b(first)))) + first


def train(rank: int, record: bool) -> None:
    """Compare this rank's weights after some steps with those of one plain network on the whole batch."""
    from volseg.parallel import ModelParallel

    torch.manual_seed(0)
    net = Net().double()
    plain = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * 3, split_size=1, record=record)
    x = torch.randn(4, 2, 4, 4, 4, dtype=torch.float64)
    own = x.tensor_split(WORLD)[rank]
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


def test_replicas_of_a_pipeline_train_as_one_network(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], stderr=subprocess.PIPE, encoding="utf-8")
        for rank in range(WORLD)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(errors)


def main(rank: int, folder: str) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    for record in (False, True):
        train(rank, record)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
