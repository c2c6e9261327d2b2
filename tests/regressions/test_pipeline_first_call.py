"""The first call of a pipeline on a host took four to five steps' time, and said nothing of its batch norms."""

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.parallel import ModelParallel

DEVICES = ["cpu", "cpu:1"]


class ConvolvedSamples(TorchDispatchMode):
    """Counts the samples that convolutions work on, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.samples[str(func)] += len(args[0])
        return func(*args, **(kwargs or {}))

    @property
    def work(self) -> int:
        """A backward pass takes twice the time of a forward pass."""
        return sum(count * (2 if "backward" in name else 1) for name, count in self.samples.items())


def build_net(norm: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Conv3d(4, 2, 1))


@pytest.mark.parametrize(("batch", "split_size"), [(1, 1), (2, 2), (4, 2), (8, 2), (4, 1)])
def test_the_first_call_takes_at_most_three_steps_work(batch, split_size):
    volumes = torch.randn(batch, 1, 5, 6, 7)
    with ConvolvedSamples() as step:
        build_net(nn.InstanceNorm3d)(volumes).sum().backward()
    model = ModelParallel(build_net(nn.InstanceNorm3d), devices=DEVICES, split_size=split_size)
    with ConvolvedSamples() as first:
        model(volumes).sum().backward()
    assert step.work == 2 * batch * 3
    assert first.work <= 3 * step.work


@pytest.mark.parametrize(
    ("norm", "split_size", "is_training", "warns"),
    [
        (nn.BatchNorm3d, 2, True, True),
        (nn.BatchNorm3d, 4, True, False),
        (nn.BatchNorm3d, 2, False, False),
        (nn.InstanceNorm3d, 2, True, False),
        (lambda channels: nn.BatchNorm3d(channels, track_running_stats=False), 2, True, True),
    ],
)
def test_a_batch_norm_that_sees_micro_batches_is_named_once(norm, split_size, is_training, warns, caplog):
    model = ModelParallel(build_net(norm), devices=DEVICES, split_size=split_size).train(is_training)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model(torch.randn(4, 1, 5, 6, 7))
    told = [record.message for record in caplog.records if "batch norm in a pipeline" in record.message]
    assert len(told) == warns


class KeepsFeatures(nn.Module):
    """Keeps features of its last batch as an attribute, as MONAI's DynUNet does with its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 1)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features = [self.first(x)]
        return self.second(self.features[0].relu())


def test_a_network_that_was_trained_before_can_be_placed():
    net, volumes = KeepsFeatures(), torch.randn(4, 1, 5, 6, 7)
    wanted = net(volumes)
    wanted.sum().backward()
    actual = ModelParallel(net, devices=DEVICES, split_size=2)(volumes)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)
