"""Volumes times one channel, by the kernels' plain form, against the plain network: every gradient, two steps."""

import copy
from collections.abc import Callable, Iterator

import plain_kernels
import pytest
import torch
from beside_plain import WAYS, check_beside_plain, noted
from monai.networks.nets.attentionunet import AttentionBlock
from torch import Tensor, nn

from volseg.device import broadcast_mul, fusions
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
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Use the plain forms of the kernels on a CPU; return their calls."""
    monkeypatch.setattr(pointwise, "_has_kernel", lambda volume: fusions.is_on("gates"))
    with noted(broadcast_mul, multiply=torch.mul, differentiate=plain_kernels.differentiate_product) as found:
        yield found


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gates_are_exact(name: str, way: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    product, count = PRODUCTS[name]
    check_beside_plain(Gated(product).double(), WAYS[way], torch.rand(2, 2, 34, 3, 5, dtype=torch.float64))
    each = 1 + (way == "two")
    assert calls == ((["multiply"] * each + ["differentiate"] * each) * 3 + ["multiply"] * 4 * each) * bool(count)


@pytest.mark.parametrize("way", ["one", "two"])
def test_monais_attention_block_is_exact(way: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    plain = Attention().double()
    check_beside_plain(plain, WAYS[way], torch.rand(2, 2, 34, 4, 3, dtype=torch.float64))
    assert calls
    calls.clear()
    with fusions.without("gates"):
        check_beside_plain(plain, WAYS[way], torch.rand(2, 2, 34, 4, 3, dtype=torch.float64))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_the_product_is_torchs(dtype: torch.dtype, calls: list[str]) -> None:
    torch.manual_seed(0)
    net, x = Gated(lambda x, gate: x * gate), torch.rand(1, 2, 6, 4, 3)

    def run() -> tuple[list[Tensor], list[str]]:
        calls.clear()
        parallel = WAYS["one"](copy.deepcopy(net))
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
    net = WAYS["two"](nn.Conv3d(2, 6, 3, padding=1))
    output = net(torch.rand(1, 2, 34, 3, 5))
    assert isinstance(output, ShardedVolume)
    (output * output[:, :1].sigmoid()).mean().backward()
    assert not calls
