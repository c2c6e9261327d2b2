import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from volseg.parallel.pipeline import Pipeline, PipelineStrategy
from volseg.parallel.pipeline.recorder import MOST_RECORDINGS, WARM_UP, Conditions, identify_batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(2, 2), nn.Linear(2, 2), 1.0

    def forward(self, x: Tensor, mode: str = "") -> Tensor:
        return self.b(self.a(x) * self.gain)


def pipeline(net: nn.Module) -> PipelineStrategy:
    return PipelineStrategy(net, Pipeline(split_size=1, cuts=["b"], record=True), devices=["cpu"] * 2)


def test_at_most_a_few_kinds_are_kept():
    """``tests/parallel/test_record_policy.py`` tests which kind is replaced."""
    strategy = pipeline(Net())
    for batch in range(1, MOST_RECORDINGS + 3):
        for _ in range(WARM_UP + 1):
            output = strategy(torch.zeros(batch, 2))
        kind = "_ReplayedBackward" if batch <= MOST_RECORDINGS else "CatBackward0"
        assert type(output.grad_fn).__name__ == kind
    assert strategy._recorder.num_kept == MOST_RECORDINGS


def test_precision_that_differs_by_layer_can_be_asked():
    """``allow_tf32`` raises where convolutions and recurrent layers differ, and so did every batch of a pipeline."""
    x, cpu, cudnn = torch.zeros(2, 2), torch.device("cpu"), torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        pytest.skip("this torch has one setting for both")
    default, before = identify_batch(1, ((x,), {}), cpu), (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "ieee", "tf32"
        assert identify_batch(1, ((x,), {}), cpu) != default
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
    assert identify_batch(1, ((x,), {}), cpu) == default


def test_a_call_under_a_dispatch_mode_is_never_recorded():
    """The mode sees functions, and a replay calls none."""
    with FlopCounterMode(display=False):
        assert identify_batch(1, ((torch.zeros(2, 2),), {}), torch.device("cpu")) is None


def test_kind_follows_everything_plain_that_forward_could_read():
    net, x = Net(), torch.zeros(2, 2)
    pipeline(net)(x)
    look = Conditions(net)

    def identify(*args: Tensor, **kwargs: str) -> object:
        return identify_batch(look(), (args, kwargs), torch.device("cpu"))

    kinds = [identify(x)]
    assert identify(x.clone()) == kinds[0]
    kinds += [identify(torch.zeros(3, 2)), identify(x.double()), identify(x, mode="other")]
    kinds.append(identify(x.clone().requires_grad_()))
    for context in (torch.no_grad(), torch.autocast("cpu")):
        with context:
            kinds.append(identify(x))
    for change in (
        lambda: setattr(net, "gain", 2.0),
        net.b.eval,
        lambda: net.a.weight.requires_grad_(False),
        lambda: setattr(net.a.weight, "data", net.a.weight.data.clone()),
    ):
        change()
        kinds.append(identify(x))
    assert len(set(kinds)) == len(kinds)


def test_hooks_and_arguments_that_are_not_plain_are_never_recorded():
    net, x, cpu = Net(), torch.zeros(2, 2), torch.device("cpu")
    pipeline(net)(x)
    look = Conditions(net)
    assert identify_batch(look(), ((x, object()), {}), cpu) is None
    net.b.register_forward_hook(lambda module, args, output: None)
    assert identify_batch(look(), ((x,), {}), cpu) is None


def test_a_condition_that_was_there_before_is_known_again() -> None:
    net = Net()
    conditions = Conditions(net)
    training = conditions()
    assert conditions() == training
    net.eval()
    assert conditions() != training
    net.train()
    assert conditions() == training
    net.drawing = random.Random(0)
    assert conditions() is None
    del net.drawing
    net.kept = torch.zeros(2)
    conditions()
    form = conditions.form
    for kept, is_same in ((torch.ones(2), True), (torch.ones(2, 1), False)):
        number, net.kept = conditions(), kept
        assert conditions() != number  # a replay would leave the old one
        assert (conditions.form == form) == is_same
