"""Random networks, cut anywhere: the pipeline equals the plain network."""

import copy
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.costs import observe
from volseg.parallel.pipeline.launch import WARM_UP
from volseg.parallel.pipeline.trace import segments

UNARY = {
    "scale": lambda x: x * 1.25,
    "gate": lambda x: x * torch.sigmoid(x),
    "flip": lambda x: x.flip(-1),
    "relu, in place": lambda x: F.relu(x, inplace=True),
    "half of it, in place": lambda x: x.narrow(1, 0, 1).mul_(0.5) + 0 * x,
    "permuted": lambda x: x.transpose(-1, -2).contiguous(),
    "without grad": lambda x: x + x.detach().tanh(),
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


class Dag(nn.Module):
    """Runs its steps; every value stays available to all later ones."""

    def __init__(self, steps: list[Step], layers: int) -> None:
        super().__init__()
        self.steps = steps
        kinds = (lambda: nn.Conv2d(2, 2, 3, padding=1), lambda: nn.GroupNorm(1, 2), lambda: nn.PReLU(2))
        self.layers = nn.ModuleList(kinds[number % 3]() for number in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        values = [x * 1.0, y + 1.0]
        for step in self.steps:
            first, second = values[step.first % len(values)], values[step.second % len(values)]
            if step.kind == "layer":
                values.append(self.layers[step.layer](first))
            elif step.kind in UNARY:
                values.append(UNARY[step.kind](first))
            else:
                values.append(BINARY[step.kind](first, second))
        return {"last": values[-1], "all": sum(values), "some": (values[0], [values[len(values) // 2]])}


@st.composite
def dags(draw):
    layers = draw(st.integers(2, 6))
    kinds = st.one_of(st.just("layer"), st.sampled_from([*UNARY, *BINARY]))
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


@settings(max_examples=40)
@given(net=dags(), batch=st.integers(1, 5), split_size=st.integers(1, 4), data=st.data())
def test_any_network_cut_anywhere_equals_the_plain_one(net, batch, split_size, data):
    torch.manual_seed(0)
    net = net.double()
    x, y = (torch.randn(batch, 2, 4, 4, dtype=torch.float64) for _ in range(2))
    reference = copy.deepcopy(net)
    try:
        expected, expected_inputs = run(reference, x, y)
    except RuntimeError as failure:
        if "modified by an inplace operation" in str(failure) or "in-place" in str(failure):
            return  # autograd itself refuses some changes in place; there is nothing to compare with
        raise
    _, trace, _ = observe(net, (x, y), {}, torch.device("cpu"))
    starts = list(dict.fromkeys(segment.calls[0].path for segment in segments(trace)))[1:]
    chosen = data.draw(st.sets(st.sampled_from(starts), max_size=4)) if starts else set()
    cuts = [path for path in starts if path in chosen]
    model = ModelParallel(
        net, strategy="pipeline", devices=["cpu"] * 5, split_size=split_size, cuts=cuts, launch="graphs"
    )
    for _ in range(WARM_UP + 1):  # eagerly, then from a recording
        net.zero_grad()
        actual, actual_inputs = run(model, x, y)
        # Sums over samples are taken in another order; values stay below 1e4 here.
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(actual_inputs, expected_inputs, rtol=1e-9, atol=1e-7)
        for mine, plainly in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, plainly.grad, rtol=1e-9, atol=1e-7)
