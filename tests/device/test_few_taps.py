"""The own kernels of a network's first convolution, and of few channels to few, against convolution in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.convolution import choice, few_channels, few_taps
from volseg.device.convolution.settings import Settings

SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = {
    "U-Net": ((9, 1, 20, 28, 20), 32, (3, 3, 3), (1, 1, 1)),
    "slab with its halo, two channels": ((1, 2, 6, 5, 7), 16, (3, 3, 3), (0, 1, 1)),
    "V-Net's kernel, odd width": ((1, 1, 16, 7, 15), 20, (5, 5, 5), (2, 2, 2)),
    "flat kernel, four channels": ((2, 4, 4, 5, 5), 64, (1, 3, 3), (0, 1, 1)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_float64(name: str, channels_last: bool, dtype: torch.dtype) -> None:
    shape, channels, kernel, padding = SHAPES[name]
    x = torch.randn(shape, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d) if channels_last else x
    weight = (torch.randn(channels, shape[1], *kernel, device="cuda") / 5).to(dtype)
    exact = weight.double().requires_grad_()
    expected = F.conv3d(x.double(), exact, padding=padding)
    gradient = torch.randn_like(expected).to(dtype).contiguous(memory_format=torch.channels_last_3d)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    got = few_taps.forward(x, weight, padding)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    torch.testing.assert_close(got.double(), expected.detach(), rtol=rounding, atol=1e-4)
    derived = few_taps.weight_gradient(gradient, x, weight, padding)
    assert derived.equal(few_taps.weight_gradient(gradient, x, weight, padding))
    error = (derived.double() - wanted).abs().max() / wanted.abs().max()
    assert float(error) < 2 * rounding  # of the largest, and of the sums


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [(3, 3), (4, 2), (1, 4)])
@pytest.mark.parametrize("padding", [(1, 1, 1), (0, 2, 1)])
def test_few_channels_to_few_equal_float64(
    channels: tuple[int, int], padding: tuple[int, ...], dtype: torch.dtype
) -> None:
    def half(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last_3d)

    x, weight, bias = half(2, channels[0], 9, 17, 30), half(*channels[::-1], 3, 3, 3), torch.randn(channels[1]).cuda()
    exact = x.double().requires_grad_()
    expected = F.conv3d(exact, weight.double(), bias.to(dtype).double(), padding=padding)
    gradient = half(*expected.shape)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    got = few_channels.forward(x, weight, bias.to(dtype), padding)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=rounding, atol=1e-4)
    derived = few_channels.input_gradient(gradient, weight, padding)
    torch.testing.assert_close(derived.double(), wanted, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bias_alone_has_torchs_gradient(channels_last: bool, settings: Callable[..., Settings]) -> None:
    x, weight, gradient = torch.randn(2, 3, 5, 4, 6), torch.randn(7, 3, 3, 3, 3), torch.randn(2, 7, 5, 4, 6)
    given = gradient, x, weight, [7], settings((1, 1, 1)), channels_last
    together = choice.differentiate(*given, [True, True, True])
    alone = choice.differentiate(*given, [False, False, True])
    assert alone[:2] == [None, None]
    assert alone[2] is not None
    assert together[2] is not None
    torch.testing.assert_close(alone[2], together[2])
