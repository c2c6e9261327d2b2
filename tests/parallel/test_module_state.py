"""What a forward pass leaves behind in a network is put back, or lent for the time of a recomputation."""

import torch
from torch import nn

from volseg.parallel.module_state import remember


class Counting(nn.Module):
    """Changes everything that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("absent", None)
        self.plain = torch.zeros(2)
        self.seen: list[int] = []
        self.table = {"calls": 0, "values": torch.zeros(1)}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.plain.add_(1)
        self.seen.append(len(self.seen))
        self.table["calls"] += 1
        self.table["values"].add_(1)
        self.calls += 1
        self.absent = torch.ones(1)
        self.added = "attribute"
        return self.norm(x)


def state(net: Counting) -> tuple:
    return (
        net.count.item(),
        net.plain.tolist(),
        list(net.seen),
        net.table["calls"],
        net.table["values"].item(),
        net.calls,
        net.absent if net.absent is None else net.absent.tolist(),
        hasattr(net, "added"),
        net.norm.num_batches_tracked.item(),
        net.norm.running_mean.tolist(),
    )


def test_a_pass_that_does_not_count_leaves_no_trace() -> None:
    net, x = Counting(), torch.randn(4, 2)
    before, known = state(net), remember(net)
    objects = net.count, net.seen, net.table, net.plain
    net(x)
    assert state(net) != before
    known.put_back()
    assert state(net) == before
    assert all(a is b for a, b in zip(objects, (net.count, net.seen, net.table, net.plain), strict=True))


def test_a_recomputation_sees_the_state_of_then_and_changes_nothing() -> None:
    net, x = Counting(), torch.randn(4, 2)
    before, known = state(net), remember(net)
    net(x)
    after, versions = state(net), (net.count._version, net.norm.running_mean._version)
    for _ in range(2):
        with known.lent():
            assert state(net) == before
            net(x)
            assert state(net) == after
        assert state(net) == after
        assert (net.count._version, net.norm.running_mean._version) == versions
