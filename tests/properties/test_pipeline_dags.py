"""Random networks, cut anywhere: the pipeline equals the plain network."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.costs import observe_copy
from volseg.parallel.pipeline.recorder import WARM_UP
from volseg.parallel.pipeline.trace import list_segments
from volseg.parallel.verification.comparison import join


def held_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


UNARY = {
    "scale": lambda x: x * 1.25,
    "gate": lambda x: x * torch.sigmoid(x),
    "flip": lambda x: x.flip(-1),
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "half of it, in place": lambda x: x.narrow(1, 0, 1).mul_(0.5) + 0 * x,
    "permuted": lambda x: x.transpose(-1, -2).contiguous(),
    "without grad": lambda x: x + x.detach().tanh(),
    "partly without grad": held_without_grad,
    "first rows, in place": lambda x: (x.narrow(2, 0, 2).add_(0.25), x * 1)[1],
    "resampled": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "statistics of its own": lambda x: torch.nn.functional.instance_norm(x),
}
BINARY = {
    "add": torch.add,
    "concatenate": lambda x, y: torch.cat([x[:, :1], y[:, 1:]], dim=1),
    "add, in place": lambda x, y: x.mul(1.0).add_(y),
    "onto the first, in place": lambda x, y: x.add_(y) if x is not y else x + y,
}


@dataclass(frozen=True)
class Step:
    """One node: a layer (by number) or a function, and which earlier values it reads."""

    kind: str
    layer: int
    first: int
    second: int


def count(net: "Dag", x: Tensor) -> Tensor:
    """Count calls in place, and use the number."""
    net.calls.add_(1)
    return x + net.calls.clone() * 0.1


def remember_mean(net: "Dag", x: Tensor) -> Tensor:
    """Replace a buffer."""
    net.mean = net.mean * 0.5 + x.detach().mean()
    return x * 1.0 + net.mean


def move_code(net: "Dag", x: Tensor) -> Tensor:
    """Change a buffer behind autograd's back."""
    net.code.data.mul_(0.9).add_(x.detach().mean((0, 2, 3)).view(1, 2, 1, 1))
    return x + net.code.clone()


def read_state(net: "Dag", x: Tensor) -> Tensor:
    return x + net.calls.clone() + net.mean + net.code.clone()


def training_only(net: "Dag", x: Tensor) -> Tensor:
    return x * 1.5 if net.training else x - 0.5


STATEFUL = {
    "count": count,
    "remember the mean": remember_mean,
    "move the code": move_code,
    "read the state": read_state,
    "by mode": training_only,
}


class Dag(nn.Module):
    """Runs its steps; every value stays available to all later ones."""

    def __init__(self, steps: list[Step], layers: int) -> None:
        super().__init__()
        self.steps = steps
        kinds = (lambda: nn.Conv2d(2, 2, 3, padding=1), lambda: nn.GroupNorm(1, 2), lambda: nn.PReLU(2))
        self.layers = nn.ModuleList(kinds[number % 3]() for number in range(layers))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("code", torch.ones(1, 2, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        values = [x * 1.0, y + 1.0]
        for step in self.steps:
            first, second = values[step.first % len(values)], values[step.second % len(values)]
            if step.kind == "layer":
                values.append(self.layers[step.layer](first))
            elif step.kind in STATEFUL:
                values.append(STATEFUL[step.kind](self, first))
            elif step.kind in UNARY:
                values.append(UNARY[step.kind](first))
            else:
                values.append(BINARY[step.kind](first, second))
        return {"last": values[-1], "all": sum(values), "some": (values[0], [values[len(values) // 2]])}


@st.composite
def dags(draw, functions=(*UNARY, *BINARY)):
    layers = draw(st.integers(2, 6))
    kinds = st.one_of(st.just("layer"), st.sampled_from(functions))
    places = st.integers(0, 20)
    steps = draw(st.lists(st.builds(Step, kinds, st.integers(0, layers - 1), places, places), min_size=2, max_size=14))
    # Every layer takes part: the others would have no gradient to compare.
    return Dag([*steps, *(Step("layer", number, -1, 0) for number in range(layers))], layers)


def run(module, x: Tensor, y: Tensor):
    """Outputs and all gradients, or the error that the plain network raises too."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    output = module(x, y)
    leaves = [output["last"], output["all"], output["some"][0], output["some"][1][0]]
    total = sum((leaf * (place + 1)).square().sum() for place, leaf in enumerate(leaves))
    total.backward()
    return leaves, [x.grad, y.grad]


def in_micro_batches(net: nn.Module, size: int):
    """What a pipeline computes, without one: the plain network on each micro-batch, in order."""

    return lambda x, y: join([net(*pieces) for pieces in zip(x.split(size), y.split(size), strict=True)])


def cut_somewhere(net: nn.Module, x: Tensor, y: Tensor, data) -> list[str]:
    _, trace, _ = observe_copy(net, (x, y), {}, torch.device("cpu"))
    starts = list(dict.fromkeys(segment.calls[0].path for segment in list_segments(trace)))[1:]
    chosen = data.draw(st.sets(st.sampled_from(starts), max_size=4)) if starts else set()
    return [path for path in starts if path in chosen]


def refused_by_autograd(failure: RuntimeError) -> bool:
    """Some changes in place autograd itself refuses; there is nothing to compare with."""
    return "modified by an inplace operation" in str(failure) or "in-place" in str(failure)


def assert_same_steps(net, split_size: int, batches, modes, devices=("cpu", "cpu:1"), **options) -> None:
    """Outputs, gradients and buffers of batch after batch, plainly by micro-batches and as a pipeline."""
    reference = copy.deepcopy(net)
    model = ModelParallel(net, strategy="pipeline", devices=[*devices] * 3, split_size=split_size, **options)
    for (x, y), training in zip(batches, modes, strict=True):
        for each in (net, reference):
            each.train(training)
            each.zero_grad()
        try:
            expected, expected_inputs = run(in_micro_batches(reference, split_size), x, y)
        except RuntimeError as failure:
            if refused_by_autograd(failure):
                return
            raise
        actual, actual_inputs = run(model, x, y)
        # Sums over samples are taken in another order; values stay below 1e4 here.
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(actual_inputs, expected_inputs, rtol=1e-9, atol=1e-7)
        for mine, plainly in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to(plainly.device), plainly.grad, rtol=1e-9, atol=1e-7)
        buffers, expected = ({name: b.cpu() for name, b in each.named_buffers()} for each in (net, reference))
        torch.testing.assert_close(buffers, expected, rtol=1e-9, atol=1e-9)


def pairs(batch: int, number: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = batch, 2, 4, 4
    return [tuple(torch.randn(shape, dtype=torch.float64, device=device) for _ in range(2)) for _ in range(number)]


@settings(max_examples=40)
@given(
    net=dags() | dags((*UNARY, *BINARY, *STATEFUL, *STATEFUL)),
    batch=st.integers(1, 5),
    split_size=st.integers(1, 4),
    record=st.booleans(),
    data=st.data(),
)
def test_any_network_cut_anywhere_equals_the_plain_one(net, batch, split_size, record, data):
    """State that forward changes is that of the micro-batches in order."""
    net, batches = net.double(), pairs(batch, WARM_UP + 3)
    cuts = cut_somewhere(net, *batches[0], data)
    modes = [True] * (WARM_UP + 1) + data.draw(st.sampled_from([[True, False], [False, True], [True, True]]))
    assert_same_steps(net, split_size, batches, modes, cuts=cuts, record=record)


@pytest.mark.multi_gpu
@settings(max_examples=100)
@given(net=dags(), batch=st.integers(1, 18), split_size=st.integers(1, 3), data=st.data())
def test_any_network_on_two_gpus_equals_the_plain_one(net, batch, split_size, data):
    """Streams of copies, of lanes and of autograd must wait for each other."""
    cuts = cut_somewhere(net.double(), *pairs(1, 1)[0], data)
    batches = pairs(batch, WARM_UP + 3, "cuda:0")
    two = ("cuda:0", "cuda:1")
    assert_same_steps(net.cuda(), split_size, batches, [True] * len(batches), two, cuts=cuts, record=True)
