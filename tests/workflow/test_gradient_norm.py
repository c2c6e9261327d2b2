"""The norm of the whole gradient, which clipping computes anyway, for curves."""

import math

import pytest
import torch

from volseg import ModelParallel, Training
from volseg.parallel import Pipeline, Spatial


def make_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.Conv3d(4, 2, 1))


BATCHES = [
    {
        "image": torch.randn(2, 1, 8, 4, 4, generator=torch.Generator().manual_seed(number)),
        "label": torch.zeros(2, 8, 4, 4).long(),
    }
    for number in range(3)
]


def train(network, **settings):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    return Training(network, torch.nn.functional.cross_entropy, optimizer, BATCHES, epochs=1, **settings).run()[0]


def compute_expected(batches):
    """Return the norm of the mean gradient of some batches."""
    network = make_network()
    for batch in batches:
        (torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"]) / len(batches)).backward()
    return math.sqrt(sum(parameter.grad.square().sum().item() for parameter in network.parameters()))


def test_of_gathered_batches_it_is_that_of_their_mean():
    expected = (compute_expected(BATCHES[:2]) + compute_expected(BATCHES[2:])) / 2
    assert train(make_network(), accumulate=2).gradient_norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("clip", [1e-3, 12.0, None])
@pytest.mark.parametrize("strategy", [None, Spatial(axes="D"), Pipeline(split_size=1, cuts=["1"])])
def test_it_is_the_mean_of_the_steps_norms_before_clipping_on_any_devices(strategy, clip):
    expected = sum(compute_expected([batch]) for batch in BATCHES) / 3
    net = make_network()
    model = net if strategy is None else ModelParallel(net, strategy=strategy, devices=["cpu", "cpu"])
    assert train(model, clip=clip).gradient_norm == pytest.approx(expected, rel=1e-5)


def test_records_say_where_the_time_went_and_how_many_voxels_a_second():
    record = train(make_network(), validation=None)
    assert record.batches == 3
    assert record.voxels_per_second == pytest.approx(3 * 2 * 8 * 4 * 4 / record.seconds)


@pytest.mark.gpu
def test_a_recorded_step_gives_the_norm_of_each_batch():
    expected = compute_expected([BATCHES[0]])
    network = make_network().cuda()
    optimizer, loss = torch.optim.SGD(network.parameters(), lr=0.0, fused=True), torch.nn.functional.cross_entropy
    training = Training(network, loss, optimizer, BATCHES[:2] * 5, epochs=1, precision="fp32", clip=12.0)
    step, norms = training.step, []
    training.step = Noted(step, norms)
    training.run()
    assert step.recorded is not None
    assert [norm.item() for norm in norms][0::2] == pytest.approx([expected] * 5, rel=1e-4)
    assert norms[1].item() != pytest.approx(expected, rel=1e-3)


class Noted:
    def __init__(self, step, norms):
        self._step, self._norms = step, norms

    def __call__(self, *args, **named):
        losses = self._step(*args, **named)
        self._norms.append(self._step.gradient_norm)
        return losses

    def __getattr__(self, name):
        return getattr(self._step, name)
