"""The layers that a profiler finds in a real step of a small network."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from volseg.profiling.kernels import LOSS, OPTIMIZER
from volseg.profiling.places import PlaceWatch


class Net(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU())
        self.head = nn.Conv3d(2, 2, 1)
        self.recomputes = recomputes

    def forward(self, x):
        x = checkpoint(self.stem, x, use_reentrant=False) if self.recomputes else self.stem(x)
        return self.head(x) * 2.0


class PlacedOperators(TorchDispatchMode):
    def __init__(self, watch):
        super().__init__()
        self.watch, self.found = watch, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func.overloadpacket.__name__, *self.watch.find_place()))
        return func(*args, **(kwargs or {}))


def watch_step(net, *, batches=1):
    """Return the places of a step's operators, by the operator and in order."""
    watch = PlaceWatch(lambda module: module if module is net else None)
    operators = PlacedOperators(watch)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch.watching(), operators:
        for _ in range(batches):
            loss = net(torch.zeros(1, 1, 4, 4, 4)).square().mean()
            loss.backward()
        optimizer.step()
    return operators.found, watch


def test_operators_are_placed_by_module_and_direction():
    found, watch = watch_step(Net())
    places = {(name, layer, direction) for name, layer, direction in found}
    assert {
        ("convolution", "stem.0", "forward"),
        ("relu", "stem.1", "forward"),
        ("convolution", "head", "forward"),
        ("mul", "(step)", "forward"),  # of the network itself, which has no module for it
        ("mean", LOSS, "forward"),
        ("pow", LOSS, "forward"),
        ("mul", "(step)", "backward"),
        ("convolution_backward", "head", "backward"),
        ("threshold_backward", "stem.1", "backward"),
        ("convolution_backward", "stem.0", "backward"),
    } <= places
    assert all(layer == OPTIMIZER for _, layer, direction in found if direction == "optimizer")
    assert found[-1][1:] == (OPTIMIZER, "optimizer")
    assert watch.classes == {
        "(step)": "Net",
        "stem": "Sequential",
        "stem.0": "Conv3d",
        "stem.1": "ReLU",
        "head": "Conv3d",
    }


def test_a_second_batch_of_a_step_is_placed_as_the_first_and_what_is_computed_again_says_so():
    once, twice = (
        [each for each in watch_step(Net(), batches=batches)[0] if each[2] == "forward"] for batches in (1, 2)
    )
    assert twice == once * 2
    found, _ = watch_step(Net(recomputes=True))
    assert {("convolution", "stem.0", "recompute"), ("convolution_backward", "stem.0", "backward")} <= {*found}


def test_other_modules_are_none_of_the_networks_and_one_that_fails_leaves_the_watch_as_it_was():
    net = Net()
    watch = PlaceWatch(lambda module: module if module is net else None)
    with watch.watching():
        nn.ReLU()(torch.zeros(1))
        assert watch.find_place().layer == "(step)"
        assert watch.classes == {}
        with pytest.raises(RuntimeError):
            net(torch.zeros(1, 5, 4, 4, 4))
        assert watch.find_place().layer == LOSS, "no module runs any more"
