"""Placement tested without GPUs: fake CUDA tensors refuse functions of tensors on different devices."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from volseg.parallel.pipeline import Pipeline, PipelineStrategy, transfer
from volseg.parallel.pipeline.costs import observe_copy
from volseg.parallel.pipeline.placement import Location, PlacedRun, Placement, place
from volseg.parallel.pipeline.statistics import FrozenStatistics
from volseg.parallel.pipeline.trace import list_segments


class Net(nn.Module):
    """Skips, a reused layer, tied weights, a buffer, a tensor made in forward, a state across stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(4))
        self.d.weight = self.a.weight
        self.norm = nn.BatchNorm3d(2)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(self.norm(first)) * self.gain
        grid = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        third = self.c(torch.cat([second.narrow(1, 0, 1), first.narrow(1, 1, 1)], 1)) + grid
        fourth = self.d(self.b(third)) * self.gain + weight
        return F.interpolate(fourth, scale_factor=2.0) + F.interpolate(x, scale_factor=2.0)


def on_fake_devices(net: nn.Module, placement: Placement, fake: FakeTensorMode) -> Placement:
    """Exchange every parameter and buffer for a fake one on ``cuda:stage``."""
    locations = tuple(Location(old.stage, torch.device("cuda", old.stage)) for old in placement.locations)
    exchanged, owners = {}, {}
    for module in net.modules():
        for registry in (module._parameters, module._buffers):
            for name, state in registry.items():
                stage = placement.owners[id(state)].stage
                if id(state) not in exchanged:
                    held = fake.from_tensor(state).detach().to(locations[stage].device)
                    exchanged[id(state)] = (
                        nn.Parameter(held, requires_grad=False) if registry is module._parameters else held
                    )
                registry[name] = exchanged[id(state)]
                owners[id(registry[name])] = locations[stage]
    anchors = {module: [locations[at.stage] for at in calls] for module, calls in placement.anchors.items()}
    return Placement(locations, anchors, owners, tuple(exchanged.values()))


def test_every_function_finds_its_tensors_on_its_stage(monkeypatch):
    net = Net()
    x, weight = torch.randn(2, 2, 4, 4, 4), torch.randn(())
    _, trace, _ = observe_copy(net, (x, weight), {}, torch.device("cpu"))
    found = list_segments(trace)
    placement = place(net, trace, [1] * len(found), [torch.device("cpu")] * len(found))
    # Selecting a device and its streams needs a driver.
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(transfer, "copy_between", lambda tensor, target: (tensor.to(target), None))
    with FakeTensorMode() as fake, torch.no_grad():
        faked = on_fake_devices(net, placement, fake)
        with PlacedRun(faked, FrozenStatistics()):
            output = net(fake.from_tensor(x).to("cuda:0"), fake.from_tensor(weight))
        with pytest.raises(RuntimeError, match="device"):
            output + output.to("cuda:0")  # the check checks
    assert output.device == torch.device("cuda", len(found) - 1)


def nodes_behind(tensor: Tensor) -> set:
    todo, seen = [tensor.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return seen


def test_each_tensor_is_sent_once_to_each_stage_that_uses_it():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv3d(2, 2, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            second = self.b(first) + first * first
            return self.c(second) + first * second

    net = Skips()
    strategy = PipelineStrategy(net, Pipeline(split_size=2, cuts=["b", "c"], record=False), devices=["cpu"] * 3)
    output = strategy(torch.randn(4, 2, 2, 2, 2))
    # To stage 1: first. To stage 2: first and second. For each of two micro-batches.
    names = [node.name() for node in nodes_behind(output)]
    assert names.count("_CrossBackward") == names.count("_DepartBackward") == 3 * 2
