"""Volumes times one channel, by the kernels' plain form, against the plain network: every gradient, two steps."""

import copy
from collections.abc import Callable
from typing import Any

import plain_kernels
import pytest
import torch
from monai.networks.nets.attentionunet import AttentionBlock
from torch import Tensor, nn

from volseg.device import broadcast_mul, fusions
from volseg.parallel import ModelParallel
from volseg.parallel.spatial.operators import pointwise
from volseg.parallel.spatial.volume import ShardedVolume

Product = Callable[[Tensor, Tensor], Tensor]


def in_place(x: Tensor, gate: Tensor) -> Tensor:
    out = x + 1.0
    return out.mul_(gate)


def gate_changed(x: Tensor, gate: Tensor) -> Tensor:
    out = x * gate
    with torch.no_grad():
        seen = gate.clone()
    return out + seen


PRODUCTS: dict[str, tuple[Product, int]] = {
    "x * gate": (lambda x, gate: x * gate, 1),
    "gate * x": (lambda x, gate: gate * x, 1),
    "torch.mul": (torch.mul, 1),
    "multiply": (lambda x, gate: x.multiply(gate), 1),
    "gate seen behind": (gate_changed, 1),
    "named": (lambda x, gate: torch.mul(x, other=gate), 0),
    "in place": (in_place, 0),
    "one voxel": (lambda x, gate: x * x.mean((2, 3, 4), keepdim=True).sigmoid(), 0),
    "twice itself": (lambda x, gate: gate * gate * x, 1),
}
"""What is written, and how often it is ours."""


class Gated(nn.Module):
    """A volume, a gate from it, their product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Conv3d(2, 6, 3, padding=1),
            nn.InstanceNorm3d(6),
            nn.Conv3d(6, 2, 3, padding=1),
        )
        self.psi = nn.Sequential(nn.Conv3d(6, 1, 1), nn.BatchNorm3d(1), nn.Sigmoid())
        self.product = product

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.first(image)).relu()
        result: Tensor = self.last(self.product(x, self.psi(x)))
        return result


class Attention(nn.Module):
    """MONAI's attention block between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(2, 6, 3, padding=1), nn.Conv3d(6, 2, 3, padding=1)
        self.block = AttentionBlock(3, f_int=3, f_g=6, f_l=6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        result: Tensor = self.last(self.block(g=x * 0.5, x=x))
        return result


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a CPU take the kernels' way, by their plain forms; return what was called."""
    found: list[str] = []

    def noted(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Tensor) -> Any:
            found.append(name)
            return compute(*given)

        return run

    for name, plain in (("multiply", torch.mul), ("differentiate", plain_kernels.differentiate_product)):
        monkeypatch.setattr(broadcast_mul, name, noted(name, plain))
    monkeypatch.setattr(pointwise, "_has_kernel", lambda volume: fusions.is_on("gates"))
    return found


def train(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """Return outputs, gradients, parameters and buffers of two steps."""
    optimizer, results = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(2):
        given = (x + step).requires_grad_()
        output = call(given)
        output = output.full_tensor() if hasattr(output, "full_tensor") else output
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        assert given.grad is not None
        results += [output.detach(), given.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    return [*results, *(value.detach().clone().double() for value in net.state_dict().values())]


def compare(plain: nn.Module, devices: list[str], x: Tensor, atol: float = 1e-11, rtol: float = 1e-9) -> None:
    net = copy.deepcopy(plain)
    wanted = train(plain, plain, x)
    got = train(net, ModelParallel(net, strategy="spatial", devices=devices), x)
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]], ids=["one", "two"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gates_are_exact(name: str, devices: list[str], calls: list[str]) -> None:
    torch.manual_seed(0)
    product, count = PRODUCTS[name]
    compare(Gated(product).double(), devices, torch.rand(2, 2, 34, 3, 5, dtype=torch.float64))
    assert calls == (["multiply"] * len(devices) + ["differentiate"] * len(devices)) * 2 * count


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]], ids=["one", "two"])
def test_monais_attention_block_is_exact(devices: list[str], calls: list[str]) -> None:
    torch.manual_seed(0)
    plain = Attention().double()
    compare(plain, devices, torch.rand(2, 2, 34, 4, 3, dtype=torch.float64))
    assert calls
    calls.clear()
    with fusions.without("gates"):
        compare(plain, devices, torch.rand(2, 2, 34, 4, 3, dtype=torch.float64))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_product_is_torchs(dtype: torch.dtype, calls: list[str]) -> None:
    torch.manual_seed(0)
    net, x = Gated(lambda x, gate: x * gate), torch.rand(1, 2, 6, 4, 3)

    def run() -> tuple[list[Tensor], list[str]]:
        calls.clear()
        parallel = ModelParallel(copy.deepcopy(net), strategy="spatial", devices=["cpu"])
        with torch.autocast("cpu", dtype):
            output = parallel(x)
        output.float().square().mean().backward()
        return [output, *(p.grad for p in parallel.parameters() if p.grad is not None)], list(calls)

    ours, called = run()
    with fusions.without("gates"):
        theirs, none = run()
    assert (called, none) == (["multiply", "differentiate"], [])
    assert ours[0].equal(theirs[0])
    for one, other in zip(ours, theirs, strict=True):
        # The gate's gradient: a sum in float32 of products that are rounded here, since the plain form is torch's.
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_outside_of_the_network_products_are_torchs(calls: list[str]) -> None:
    net = ModelParallel(nn.Conv3d(2, 6, 3, padding=1), strategy="spatial", devices=["cpu", "cpu:1"])
    output = net(torch.rand(1, 2, 34, 3, 5))
    assert isinstance(output, ShardedVolume)
    (output * output[:, :1].sigmoid()).mean().backward()
    assert not calls
