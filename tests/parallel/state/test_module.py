"""Changes that a forward pass makes to a network are undone, or restored during recomputation."""

import random

import pytest
import torch
from torch import nn

from volseg.errors import ParallelError
from volseg.parallel.state.module import remember


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
        self.pair = (torch.zeros(1), [1])
        self.generator, self.drawing = torch.Generator().manual_seed(3), random.Random(3)
        self.weight = nn.Parameter(torch.ones(2))
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
        self.pair[0].data.add_(1)
        self.pair[1].append(2)
        torch.rand(1, generator=self.generator)
        self.drawing.random()
        self.weight.requires_grad_(False)
        self.weight = nn.Parameter(torch.zeros(2))
        result = self.norm(x)
        self.eval()
        return result


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
        (net.pair[0].item(), list(net.pair[1])),
        (net.generator.get_state().tolist(), net.drawing.getstate()),
        (net.weight.tolist(), net.weight.requires_grad),
        (net.training, net.norm.training),
    )


def test_a_pass_that_does_not_count_leaves_no_trace() -> None:
    net, x = Counting(), torch.randn(4, 2)
    before, known = state(net), remember(net)
    names = ("count", "seen", "table", "plain", "pair", "generator", "drawing", "weight")
    objects = [getattr(net, name) for name in names]
    assert known.list_written() == []
    net(x)
    assert {"pair", "plain", "count"} <= set(known.list_written())
    net.count.resize_(3)
    net.plain.data = torch.zeros(4, dtype=torch.float64)
    known.put_back()
    assert state(net) == before
    assert all(a is getattr(net, name) for a, name in zip(objects, names, strict=True))


def test_a_recomputation_sees_the_state_of_then_and_changes_nothing() -> None:
    net, x = Counting(), torch.randn(4, 2)
    before, known, weight = state(net), remember(net), net.weight
    net(x)
    after, versions = state(net), (net.count._version, net.norm.running_mean._version)
    for runs in (True, False):
        with known.lent():
            assert state(net) == before
            assert net.weight is weight
            if runs:
                net(x)
                assert state(net) == after
        assert state(net) == after
        assert not weight.requires_grad
        assert (net.count._version, net.norm.running_mean._version) == versions


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_modules_are_remembered_where_they_have_nothing_to_remember() -> None:
    remember(nn.Sequential(torch.jit.script(nn.ReLU())))
    with pytest.raises(ParallelError, match="the scripted module BatchNorm1d has buffers"):
        remember(nn.Sequential(torch.jit.script(nn.BatchNorm1d(2))))


def test_a_buffer_that_did_not_change_is_not_written_to() -> None:
    """Backward of an earlier pass may have saved it, and would take the writing for a change."""
    norm = nn.BatchNorm1d(2).eval()
    pending = norm(torch.ones(3, 2, requires_grad=True))
    remember(norm).put_back()
    pending.sum().backward()


def test_a_parameter_whose_value_was_noted_is_put_back() -> None:
    """Codebooks and tables that renormalise themselves are parameters that forward changes."""
    net = Counting()
    known = remember(net, [net.norm.weight])
    with torch.no_grad():
        net.norm.weight.add_(1)
    known.put_back()
    assert net.norm.weight.tolist() == [1, 1]
    with torch.no_grad():
        net.norm.bias.add_(1)
    with pytest.raises(ParallelError, match="was changed in place"):
        known.put_back()
