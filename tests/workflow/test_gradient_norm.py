"""The norm of the whole gradient, which clipping computes anyway, for curves."""

import math

import pytest
import torch

from volseg import ModelParallel, Named, Training
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
    training = Training(
        Named(network, ["image"], ["logits"]),
        Named(torch.nn.functional.cross_entropy, ["logits", "label"], ["loss"]),
        torch.optim.SGD(network.parameters(), lr=0.0),
        BATCHES,
        epochs=1,
        **settings,
    )
    return training.run()[0]


def compute_expected(batches):
    """Return the norm of the mean gradient of some batches."""
    network = make_network()
    for batch in batches:
        (torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"]) / len(batches)).backward()
    return math.sqrt(sum(parameter.grad.square().sum().item() for parameter in network.parameters()))


def test_it_is_the_mean_of_the_steps_norms_before_clipping_and_without():
    expected = sum(compute_expected([batch]) for batch in BATCHES) / 3
    assert train(make_network(), clip=1e-3).gradient_norm == pytest.approx(expected, rel=1e-5)
    assert train(make_network()).gradient_norm == pytest.approx(expected, rel=1e-5)


def test_of_gathered_batches_it_is_that_of_their_mean():
    expected = (compute_expected(BATCHES[:2]) + compute_expected(BATCHES[2:])) / 2
    assert train(make_network(), accumulate=2).gradient_norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "strategy", [Spatial(axes="D"), Pipeline(split_size=1, cuts=["1"])], ids=["spatial", "pipeline"]
)
def test_it_is_the_same_over_several_devices(strategy):
    expected = sum(compute_expected([batch]) for batch in BATCHES) / 3
    model = ModelParallel(make_network(), strategy=strategy, devices=["cpu", "cpu"])
    assert train(model, clip=12.0).gradient_norm == pytest.approx(expected, rel=1e-5)


def test_records_say_where_the_time_went_and_how_many_voxels_a_second():
    record = train(make_network(), validation=None)
    assert record.batches == 3
    assert record.voxels_per_second == pytest.approx(3 * 2 * 8 * 4 * 4 / record.seconds)


@pytest.mark.gpu
def test_a_recorded_step_gives_the_norm_of_each_batch():
    expected = compute_expected([BATCHES[0]])
    network = make_network().cuda()
    training = Training(
        Named(network, ["image"], ["logits"]),
        Named(torch.nn.functional.cross_entropy, ["logits", "label"], ["loss"]),
        torch.optim.SGD(network.parameters(), lr=0.0, fused=True),
        [BATCHES[0], BATCHES[1]] * 5,
        epochs=1,
        precision="fp32",
        clip=12.0,
    )
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
