"""Attention gates on a GPU, by kernels of our own, against float64."""

import plain_kernels
import pytest
import torch
from torch import Tensor

from volseg.device import broadcast_mul


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
        broadcast_mul.differentiate(gradient, x, gate), plain_kernels.differentiate_product(*exact), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)  # rounded once
