"""Networks that torch.compile has taken apart: each story ended in another training without a word.

What torch.compile makes is traced, and runs by torch's kernels.
"""

import pytest
import torch
from torch import Tensor, nn
from traced_graphs import trace_only

from volseg.device import compiler_internals
from volseg.errors import ParallelError
from volseg.parallel import CompiledNetwork


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)


class Heads(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv3d(1, 2, 1), nn.Conv3d(1, 2, 1), nn.Conv3d(2, 1, 1)


class KeptOverABreak(Heads):
    """What a list holds while Python runs between two graphs is an output of the first, used or not."""

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x), self.second(x)]
        torch._dynamo.graph_break()
        return self.last(features[0]) * len(features)


class KeptAsAttribute(Heads):
    """What forward() assigns is an output of the graph that no caller gets."""

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.second(x)
        return self.last(self.first(x))


@pytest.mark.parametrize("kind", [KeptOverABreak, KeptAsAttribute])
def test_a_piece_of_which_an_output_is_left_out_is_refused(kind):
    """The outputs of the whole were looked at alone: the second head got zeros for gradients, and decayed."""
    image = torch.randn(1, 1, 4, 4, 4)
    plain = kind()
    plain(image).sum().backward()
    assert plain.second.weight.grad is None
    output = CompiledNetwork(kind())(image)
    with pytest.raises(ParallelError, match=r"backward\(\) does not reach the outputs \[1\] \(from 0\) of the 2"):
        output.sum().backward()


class ChangedBehindABreak(Heads):
    """Both are used, and one is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        torch._dynamo.graph_break()
        return self.last(first.relu_()) + second.sum(1, keepdim=True)


class Views(Heads):
    """Outputs that share memory, and one that comes twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.first(x)
        return first[:, :1], first[:, 1:], self.last(self.second(x)), first


@pytest.mark.parametrize("kind", [ChangedBehindABreak, Views])
def test_what_uses_all_of_a_piece_has_the_networks_gradients(kind):
    image = torch.randn(1, 1, 4, 4, 4, dtype=torch.float64)
    plain = kind().double()
    model = CompiledNetwork(kind().double())
    model.load_state_dict(plain.state_dict())
    for net in (plain, model):
        outputs = net(image)
        sum(output.square().sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    found, expected = ({name: p.grad for name, p in net.named_parameters()} for net in (model, plain))
    # float64: a chain of functions may be ordered in another way.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Unregistered(nn.Module):
    """A plain list holds a module, which nothing finds that walks over modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Conv3d(1, 2, 1), [nn.Conv3d(2, 2, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](self.first(x))


def test_a_late_hook_of_a_module_that_is_not_registered_is_called():
    """Hooks are refused where modules are found; this one was skipped."""
    plain = Unregistered()
    model = CompiledNetwork(plain)
    image = torch.randn(1, 1, 4, 4, 4)
    model(image)
    plain.others[0].register_forward_hook(lambda module, given, output: output * 5)
    # float32: a chain of functions may be rounded in another way.
    torch.testing.assert_close(model(image), plain(image))
