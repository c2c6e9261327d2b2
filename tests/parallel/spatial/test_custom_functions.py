"""Custom autograd functions declared pointwise equal those on one device; others are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel, pointwise_function
from volseg.parallel.spatial import ShardedVolume

DEVICES = ["cpu", "cpu:1"]
VOLUME = torch.randn(2, 3, 8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pointwise_function
class Gate(torch.autograd.Function):
    """``x ** power * scale``; ``scale`` is a volume or one value per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, power: int = 2) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.power = power
        return x**power * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        of_scale = (gradient * x**ctx.power).sum_to_size(scale.shape)
        return gradient * ctx.power * x ** (ctx.power - 1) * scale, of_scale, None


class Derived(Gate):
    """Not declared itself."""


@pointwise_function
class Centered(torch.autograd.Function):
    """Declared wrongly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mean()


@pointwise_function
class Doubled(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv3d(3, 3, 3, padding=1), nn.Parameter(torch.arange(1.0, 4.0).reshape(3, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return Gate.apply(Gate.apply(y, self.scale, 3), y)


def test_a_declared_function_equals_that_on_one_device() -> None:
    torch.manual_seed(0)
    net = Net().double()
    results = []
    for run in (net, ModelParallel(net, strategy="spatial", devices=DEVICES)):
        net.zero_grad()
        image = VOLUME.clone().requires_grad_()
        output = run(image)
        output.square().mean().backward()
        whole = output.full_tensor() if isinstance(output, ShardedVolume) else output
        results.append([whole, image.grad, *(parameter.grad for parameter in net.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Derived.apply(x, x), "DerivedBackward.*pointwise_function"),
        (lambda x: Centered.apply(x), "Centered is declared pointwise, but returns something other"),
        (lambda x: Doubled.apply(x * 1), "Doubled is declared pointwise, but changes a volume in place"),
    ],
)
@pytest.mark.parametrize("read", [lambda y: y.full_tensor(), lambda y: y + 1], ids=["gathered", "used"])
def test_what_is_not_pointwise_is_refused(call: Any, message: str, read: Any) -> None:
    image = VOLUME.clone().requires_grad_()
    volume = ModelParallel(nn.Identity(), strategy="spatial", devices=DEVICES)(image)
    with pytest.raises(UnsupportedOperatorError, match=message):
        read(call(volume))


def test_a_function_is_declared_once_also_if_it_is_derived_from_a_declared_one() -> None:
    @pointwise_function
    class Declared(Gate):
        pass

    assert pointwise_function(Declared) is Declared
    torch.testing.assert_close(Declared.apply(VOLUME, VOLUME), VOLUME**3)
    volume = ModelParallel(nn.Identity(), strategy="spatial", devices=DEVICES)(VOLUME.clone().requires_grad_())
    result = Declared.apply(volume, volume)
    assert isinstance(result, ShardedVolume)
    assert torch.equal(result.full_tensor(), VOLUME**3)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("grad", [True, False])
def test_a_scripted_function_is_refused_as_what_it_is(grad: bool) -> None:
    @torch.jit.script
    def gate(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gate(x)

    for net in (Scripted(), torch.jit.script(nn.Conv3d(3, 2, 3)), nn.Sequential(torch.jit.script(nn.ReLU()))):
        model = ModelParallel(net.double(), strategy="spatial", devices=DEVICES)
        with torch.set_grad_enabled(grad), pytest.raises(UnsupportedOperatorError, match=r"torch\.jit"):
            model(VOLUME)
