"""Random networks, cut anywhere: the pipeline equals the plain network."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from micro_batches import assert_same_steps
from torch import Tensor, nn
from torch.nn import functional as F

from volseg.parallel.pipeline.costs import observe_copy
from volseg.parallel.pipeline.recorder import WARM_UP
from volseg.parallel.pipeline.trace import list_segments


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
    """One node: a layer (by number) or a function, with the earlier values that it reads."""

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


def cut_somewhere(net: nn.Module, x: Tensor, y: Tensor, data) -> list[str]:
    _, trace, _ = observe_copy(net, (x, y), {}, torch.device("cpu"))
    starts = list(dict.fromkeys(segment.calls[0].path for segment in list_segments(trace)))[1:]
    chosen = data.draw(st.sets(st.sampled_from(starts), max_size=4)) if starts else set()
    return [path for path in starts if path in chosen]


def refused_by_autograd(failure: RuntimeError) -> bool:
    """Some changes in place autograd itself refuses; there is nothing to compare with."""
    return "modified by an inplace operation" in str(failure) or "in-place" in str(failure)


def compare(net: nn.Module, split_size: int, batches: list[tuple[Tensor, ...]], **options: Any) -> None:
    options = {"devices": ["cpu", "cpu:1"] * 3, **options}
    # Values stay below 1e4 here.
    close = {"rtol": 1e-9, "atol": 1e-9}
    assert_same_steps(net, batches, split_size, refuses=refused_by_autograd, close=close, lr=1e-3, **options)


def pairs(batch: int, number: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    shape = batch, 2, 4, 4
    return [tuple(torch.randn(shape, dtype=torch.float64, device=device) for _ in range(2)) for _ in range(number)]


@settings(max_examples=20)
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
    compare(net, split_size, batches, before=lambda each, number: each.train(modes[number]), cuts=cuts, record=record)


@pytest.mark.multi_gpu
@settings(max_examples=100)
@given(net=dags(), batch=st.integers(1, 18), split_size=st.integers(1, 3), data=st.data())
def test_any_network_on_two_gpus_equals_the_plain_one(net, batch, split_size, data):
    """Streams of copies, of lanes and of autograd must wait for each other."""
    cuts = cut_somewhere(net.double(), *pairs(1, 1)[0], data)
    batches = pairs(batch, WARM_UP + 3, "cuda:0")
    compare(net.cuda(), split_size, batches, devices=["cuda:0", "cuda:1"] * 3, cuts=cuts, record=True)


# Law: a pipeline equals the plain network run by micro-batches, also if the path varies from call to call.


class Part(nn.Module):
    """Three layers, with a rule for which of them are called, and how often."""

    def __init__(self, rule: "Callable[[Part, Tensor], Tensor]") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 1), nn.Conv3d(4, 4, 1)
        self.rule, self.calls = rule, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.rule(self, x)


def drop_by_torch(part: Part, x: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.5 else x + part.a(x).tanh()


def drop_by_python(part: Part, x: Tensor) -> Tensor:
    for layer in (part.a, part.b, part.c, part.b):
        x = layer(x).sin() if random.random() < 0.5 else x
    return x


def alternate(part: Part, x: Tensor) -> Tensor:
    return part.a(x).tanh() if part.calls % 2 else part.c(part.b(x))


def swap(part: Part, x: Tensor) -> Tensor:
    return part.a(part.b(x)) if part.calls % 2 else part.b(part.a(x))


def repeat(part: Part, x: Tensor) -> Tensor:
    for _ in range(1 + part.calls % 3):
        x = part.a(x).tanh()
    return x


def repeat_by_values(part: Part, x: Tensor) -> Tensor:
    for _ in range(1 + int(x.mean() > 0)):
        x = part.b(x).tanh()
    return x


def choose_layer(part: Part, x: Tensor) -> Tensor:
    return part.a(x) if x.mean() > 0 else part.b(x).tanh()


def choose_function(part: Part, x: Tensor) -> Tensor:
    return part.a(x * 2) if x.mean() > 0 else part.a(x.tanh())


def begin_late(part: Part, x: Tensor) -> Tensor:
    return part.c(part.a(x)).sin() if part.calls > 3 else part.a(x).sin()


VARYING = (
    *(drop_by_torch, drop_by_python, alternate, swap, repeat, repeat_by_values, choose_layer, choose_function),
    begin_late,
)


def overwrite_a_gate(part: Part, x: Tensor) -> Tensor:
    gate = part.b(x).sigmoid()
    with torch.no_grad():
        gate.mul_(2)
    return part.a(x) + gate.detach()


def overwrite_by_relu(part: Part, x: Tensor) -> Tensor:
    side = part.b(x).sigmoid()
    with torch.no_grad():
        gate = F.relu(side - 0.5, inplace=True)
        side.zero_()
    return part.a(x) + gate


def overwrite_an_alias(part: Part, x: Tensor) -> Tensor:
    side = part.c(part.b(x).tanh()).sigmoid().detach()
    side.add_(1)
    return part.a(x) * side.sigmoid()


def overwrite_an_input(part: Part, x: Tensor) -> Tensor:
    side = part.b(x).tanh()
    result = part.c(side)
    with torch.no_grad():
        side.zero_()
    return part.a(x) + result.detach()


class Rounded(torch.autograd.Function):
    """Has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("rounding has no derivative")


def round_a_side(part: Part, x: Tensor) -> Tensor:
    return part.a(x) + Rounded.apply(part.b(x) * 3).detach()


SIDES = (overwrite_a_gate, overwrite_by_relu, overwrite_an_alias, overwrite_an_input, round_a_side)


def build(rules: tuple[Callable[[Part, Tensor], Tensor], ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 1), *map(Part, rules), nn.Conv3d(4, 2, 1)).double()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rules=st.lists(st.sampled_from(VARYING + SIDES), min_size=1, max_size=3),
    split_size=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 10**6),
)
def test_any_path_is_exact(rules: list[Callable[[Part, Tensor], Tensor]], split_size: int, seed: int) -> None:
    """Measuring raised a ValueError if its runs called other layers, and differentiated every result of a side branch:
    it failed with an error of torch where training needs no gradient."""
    numbers = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(4, 1, 4, 4, 4, dtype=torch.float64, generator=numbers),) for _ in range(3)]
    assert_same_steps(build(tuple(rules)), batches, split_size, lr=0.05, seed=seed, devices=["cpu", "cpu:1"])
