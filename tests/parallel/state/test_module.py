"""What a forward pass leaves behind in a network is put back, or lent for the time of a recomputation."""

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


def test_modes_parameters_and_generators_are_lent_and_put_back() -> None:
    net = Counting()
    net.generator = torch.Generator().manual_seed(3)
    net.weight = nn.Parameter(torch.ones(2))
    weight, known = net.weight, remember(net)
    first = torch.rand(1, generator=net.generator)
    net.eval()
    net.weight.requires_grad_(False)
    net.weight = nn.Parameter(torch.zeros(2))
    now = net.generator.get_state()
    with known.lent():
        assert net.training
        assert net.weight is weight
        assert weight.requires_grad
        assert torch.equal(torch.rand(1, generator=net.generator), first)
    assert not net.training
    assert net.weight is not weight
    assert not weight.requires_grad
    assert torch.equal(net.generator.get_state(), now)
    known.put_back()
    assert net.training
    assert net.weight is weight
    assert torch.equal(torch.rand(1, generator=net.generator), first)


def test_what_changed_its_shape_or_type_is_put_back() -> None:
    net = Counting()
    known = remember(net)
    net.count.resize_(3)
    net.plain.data = torch.zeros(4, dtype=torch.float64)
    known.put_back()
    assert (net.count.shape, net.plain.dtype, net.plain.tolist()) == ((), torch.float32, [0, 0])


def test_a_parameter_changed_in_place_cannot_be_undone() -> None:
    net = Counting()
    known = remember(net)
    with torch.no_grad():
        net.norm.weight.add_(1)
    with pytest.raises(ParallelError, match="a parameter among weight, bias of BatchNorm1d was changed in place"):
        known.put_back()


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


def test_generators_of_python_and_what_tuples_hold_are_lent_and_put_back() -> None:
    net = Counting()
    net.drawing, net.pair = random.Random(3), (torch.zeros(1), [1])
    known, pair = remember(net), net.pair
    first, count = net.drawing.random(), len(net.pair[1])
    assert known.list_written() == []
    net.pair[0].data.add_(1), net.pair[1].append(2)
    assert known.list_written() == ["pair"]
    with known.lent():
        assert (net.drawing.random(), net.pair[0].item(), net.pair[1]) == (first, 0, [1])
    assert (net.pair[0].item(), net.pair[1]) == (1, [1, 2])
    known.put_back()
    assert net.pair is pair
    assert (net.drawing.random(), net.pair[0].item(), len(net.pair[1])) == (first, 0, count)


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
