"""Attention gates on a GPU, by kernels of our own, against float64."""

from collections.abc import Callable

import pytest
import torch
from monai.networks.nets.attentionunet import AttentionBlock
from torch import Tensor, nn

from volseg.device import broadcast_mul


class Gate(nn.Module):
    """MONAI's attention block, of one volume with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = AttentionBlock(3, f_int=16, f_g=32, f_l=32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(g=x, x=x)
        return result


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("channels", [2, 32, 200])
def test_gates_equal_float64(channels: int, layouts: tuple[bool, bool]) -> None:
    def half(last: bool, count: int = channels) -> Tensor:
        x = torch.randn(2, count, 9, 17, 30, device="cuda").bfloat16()
        return x.contiguous(memory_format=torch.channels_last_3d) if last else x

    x, gate, gradient = half(layouts[0]), half(True, 1), half(layouts[1])
    assert broadcast_mul.multiply(x, gate).equal(x * gate)
    exact = [value.double() for value in (gradient, x, gate)]
    for got, wanted in zip(
        broadcast_mul.differentiate(gradient, x, gate), broadcast_mul.differentiate_plainly(*exact), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)  # rounded once


@pytest.mark.gpu
def test_a_network_trains_with_them(beside_float64: Callable[..., list[tuple[Tensor, Tensor]]]) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Conv3d(1, 32, 3, padding=1), nn.ReLU(), Gate(), nn.Conv3d(32, 2, 3, padding=1)]

    for one, other in beside_float64(layers, torch.randn(2, 1, 8, 12, 10, device="cuda")):
        if float(other.norm()) > 1e-9:  # a bias in front of a norm has none
            assert float((one - other).norm() / other.norm()) < 0.1
