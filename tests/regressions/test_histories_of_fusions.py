"""Stories of fused operators whose history, or whose digits, were not the plain network's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from volseg.device import doubling
from volseg.errors import ParallelError
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.spatial.operators import resize
from volseg.parallel.spatial.volume import ShardedVolume

CHANNELS = 4


class Net(nn.Module):
    """Two convolutions with their norms, activations with slopes, and a function of them."""

    def __init__(self, run: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.norm = nn.InstanceNorm3d(CHANNELS, affine=True)
        self.up, self.slopes = nn.ConvTranspose3d(CHANNELS, CHANNELS, 2, 2), nn.PReLU(CHANNELS)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def gate_apart(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.no_grad():
        gate = F.relu(y)
    return y * gate


def activate_apart_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.no_grad():
        F.relu_(y)
    return net.second(y)


def gate_a_sum_apart(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x)) + x
    with torch.no_grad():
        gate = F.relu(y)
    return net.second(y) * gate


def train_a_slope_behind_a_frozen_norm(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.no_grad():
        z = net.norm(y)
    return net.slopes(z) + net.second(y)


def look_in_inference_mode(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.inference_mode():
        scale = F.relu(y).mean().item()
    return F.relu(y) * scale


def freeze_a_slope_before_it_is_used(net: Net, x: Tensor) -> Tensor:
    y = net.slopes(net.norm(net.first(x))) + x
    net.slopes.weight.requires_grad_(False)
    z = F.relu(y) * 1
    net.slopes.weight.requires_grad_(True)
    return z


def freeze_while_recomputed(net: Net, x: Tensor) -> Tensor:
    y = net.up(net.norm(net.first(x)))
    net.up.weight.requires_grad_(False)
    z = net.second(y)
    net.up.weight.requires_grad_(True)
    return z


def change_a_gradient_unseen(net: Net, x: Tensor) -> Tensor:
    def add_one(gradient: Any) -> None:
        for slab in gradient.slabs if isinstance(gradient, ShardedVolume) else [gradient]:
            slab.data.add_(1)

    y = net.first(x)
    y.register_hook(add_one)
    return net.second(F.relu(net.norm(y)))


@pytest.fixture(params=["fast", None, "all", "tiled"])
def wrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], ModelParallel]:
    """Return a way to run a network; ``"tiled"`` on two slabs, with several small tiles."""
    monkeypatch.setattr("volseg.parallel.spatial.convolution.plan.TILE_ELEMENTS", 200)
    if request.param == "fast":
        return lambda net: FastKernels(net, "cpu")
    return lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"], checkpoint=request.param)


@pytest.mark.parametrize(
    "run",
    [
        gate_apart,
        activate_apart_in_place,
        gate_a_sum_apart,
        train_a_slope_behind_a_frozen_norm,
        look_in_inference_mode,
        freeze_a_slope_before_it_is_used,
        freeze_while_recomputed,
        change_a_gradient_unseen,
    ],
)
def test_gradients_are_those_of_the_plain_network(
    run: Callable[[Net, Tensor], Tensor], wrap: Callable[[nn.Module], ModelParallel]
) -> None:
    """An activation joined a norm that was called in another mode, and took the norm's history for its own.

    Under ``no_grad`` it was differentiated, and a slope behind a norm under ``no_grad`` got no gradient. What a forward
    froze for a while stayed frozen where its recomputation ended early.
    """
    torch.manual_seed(0)
    plain = Net(run).double()
    other = copy.deepcopy(plain)
    found = []
    for net, model in ((plain, plain), (other, wrap(other))):
        x = torch.randn(1, CHANNELS, 7, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        output = model(x)
        whole = output.full_tensor() if isinstance(output, ShardedVolume) else output
        (whole * torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view(whole.shape).sin()).sum().backward()
        found.append({"output": whole, "x": x.grad} | {name: p.grad for name, p in net.named_parameters()})
    for name, expected in found[0].items():
        ours = found[1][name]
        assert (ours is None or not ours.any()) if expected is None else ours is not None, name
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture
def doubled_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of GPUs, with the plain function that says what the kernels compute."""

    class Plainly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, slab: Tensor, part: doubling.DoubledPart, linear: bool) -> Tensor:
            ctx.slab, ctx.part, ctx.linear = slab.detach(), part, linear
            return doubling.double_plainly(slab, part, linear)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            with torch.enable_grad():
                slab = ctx.slab.requires_grad_()
                doubled = doubling.double_plainly(slab, ctx.part, ctx.linear)
            return torch.autograd.grad(doubled, slab, gradient)[0], None, None

    monkeypatch.setattr(resize, "_takes", lambda volume: True)
    monkeypatch.setattr(resize, "_Double", Plainly)


def upsample(net: Net, x: Tensor) -> Tensor:
    return F.interpolate(net.first(x), scale_factor=2, mode="trilinear")


@pytest.mark.usefixtures("doubled_on_the_cpu")
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]])
def test_an_upsampled_result_has_torchs_digits(devices: list[str]) -> None:
    """Deep supervision's upsampled logits were bfloat16 under autocast, where torch has float32."""
    torch.manual_seed(0)
    plain = Net(upsample)
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices)
    x = torch.randn(1, CHANNELS, 6, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # As on GPUs: a CPU's autocast leaves the type to what is upsampled.
        expected, found = (
            F.interpolate(plain.first(x).float(), scale_factor=2, mode="trilinear"),
            model(x).full_tensor(),
        )
    assert expected.dtype == found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    expected.square().sum().backward()
    found.square().sum().backward()
    # bfloat16's: each slab's sums of the weight's gradient are rounded to it.
    ours, theirs = model.module.first.weight.grad, plain.first.weight.grad
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()))


DIGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: x.log_softmax(1),
    "mean": lambda x: x.mean((2, 3, 4)),
}


@pytest.mark.usefixtures("doubled_on_the_cpu")
@pytest.mark.parametrize("read", DIGITS)
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]])
def test_what_is_computed_from_an_upsampled_volume_has_torchs_digits(devices: list[str], read: str) -> None:
    """Probabilities of upsampled logits were bfloat16, where the logits alone were float32 as torch's."""
    torch.manual_seed(0)
    plain = Net(upsample)
    model = ModelParallel(
        Net(lambda net, x: DIGITS[read](upsample(net, x))), strategy="spatial", devices=devices
    )  # fmt: skip
    model.module.load_state_dict(plain.state_dict())
    x = torch.randn(1, CHANNELS, 6, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = DIGITS[read](F.interpolate(plain.first(x).float(), scale_factor=2, mode="trilinear"))
        found = model(x)
        found = found.full_tensor() if isinstance(found, ShardedVolume) else found
    assert expected.dtype == found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.square().sum().backward()
    found.square().sum().backward()
    ours, theirs = model.module.first.weight.grad, plain.first.weight.grad
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()))


@pytest.mark.usefixtures("doubled_on_the_cpu")
def test_an_upsampled_result_that_was_changed_stays_changed() -> None:
    """What is counted once more is what nobody has touched."""
    torch.manual_seed(0)
    plain = Net(lambda net, x: upsample(net, x).relu_())
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=["cpu"])
    x = torch.randn(1, CHANNELS, 6, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = plain(x), model(x).full_tensor()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("net", [None, 3, "a network"])
def test_what_is_no_network_is_refused_by_name(net: Any) -> None:
    for wrap in (ModelParallel, FastKernels):
        with pytest.raises(ParallelError, match=r"torch\.nn\.Module, got"):
            wrap(net)
