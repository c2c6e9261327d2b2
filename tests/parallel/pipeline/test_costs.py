import numpy as np
import torch
from torch import Tensor, nn

from volseg.parallel.pipeline.balance import KeptActivation
from volseg.parallel.pipeline.costs import Stopwatch, measure, observe_copy
from volseg.parallel.pipeline.trace import list_segments

CPU = torch.device("cpu")


class Net(nn.Module):
    """Skips, in-place functions and functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm2d(2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu_(self.a(x))
        second = self.drop(self.norm(self.b(first))) + first
        return self.d(torch.cat([self.c(second)[:, :1], first[:, 1:]], 1)) + second


def test_timing_sees_the_functions_that_recording_saw_and_times_each_segment_both_ways():
    net, x = Net(), torch.randn(2, 2, 8, 8)
    layers = measure(net, ((x,), {}), CPU).layers
    assert [name for layer in layers for name in layer.modules] == ["a", "b", "norm", "drop", "c", "d"]
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in layers)
    probe, trace, _ = observe_copy(net, (x,), {}, CPU)
    found = list_segments(trace)
    for _ in range(2):
        with torch.enable_grad(), Stopwatch(probe, found, CPU) as watch:
            probe(x)
            watch.finish()
        assert watch._number == sum(len(segment.operations) for segment in found)
        assert np.isfinite(watch.times).all()


def test_costs_count_each_parameter_and_kept_tensor_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).exp())

    found = measure(Tied(), ((torch.randn(4, 8),), {}), CPU)
    assert [layer.parameter_bytes for layer in found.layers] == [8 * 8 * 4, 0]
    # The input for the first weight's gradient, and the exponential, which its own gradient and the second
    # weight's share.
    assert sum(block.num_bytes for block in found.activations if block.kept) == 2 * 4 * 8 * 4


def test_a_tensor_that_two_layers_keep_is_known_to_both():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    found = measure(net, ((torch.randn(4, 8),), {}), CPU).activations
    between = 4 * 8 * 4
    # The input; what the first layer hands to the second, kept by none; what both others keep; the output.
    assert found == (
        KeptActivation(between, made=0, read=(0,), kept=(0,)),
        KeptActivation(between, made=0, read=(1,)),
        KeptActivation(between, made=1, read=(2,), kept=(1, 2)),
        KeptActivation(4 * 2 * 4, made=2, read=(3,)),
    )
