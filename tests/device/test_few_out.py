"""The own kernels of convolutions with many taps of few channels to many, and to few, against float64."""

import pytest
import torch
import torch.nn.functional as F
from kernels import half
from torch import Tensor

from volseg.device.convolution import few_in, few_out

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of the result, once; the sums before it are in float32."""

CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = {
    "V-Net": ((2, 32, 20, 24, 40), 3, (5, 5, 5), (2, 2, 2)),
    "slab with its halo, odd width": ((1, 32, 9, 7, 131), 2, (5, 5, 5), (0, 2, 2)),
    "lines shorter than the kernel": ((3, 16, 7, 20, 3), 4, (5, 5, 5), (2, 2, 2)),
    "flat kernel": ((2, 64, 3, 40, 30), 6, (1, 3, 5), (0, 1, 2)),
    "much padding": ((1, 16, 8, 9, 33), 10, (3, 3, 3), (2, 0, 1)),
    "one channel": ((2, 16, 30, 31, 32), 1, (5, 5, 5), (4, 3, 2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_float64(name: str, with_bias: bool, dtype: torch.dtype) -> None:
    shape, channels, kernel, padding = CASES[name]
    x, weight = half(*shape, dtype=dtype), half(channels, shape[1], *kernel, dtype=dtype) / 10
    bias = torch.randn(channels, device="cuda").to(dtype) if with_bias else None
    exact = x.double().requires_grad_()
    expected = F.conv3d(exact, weight.double(), None if bias is None else bias.double(), padding=padding)
    gradient = half(*expected.shape, dtype=dtype)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    got = few_out.forward(x, weight, bias, padding)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=ROUNDING[dtype], atol=1e-4)
    assert got.equal(few_out.forward(x, weight, bias, padding))
    derived = few_out.input_gradient(gradient, weight, padding)
    assert derived.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(derived.double(), wanted, rtol=ROUNDING[dtype], atol=1e-4)


@pytest.mark.gpu
def test_what_is_read_may_lie_in_a_larger_volume() -> None:
    whole = half(2, 32, 12, 9, 10)
    slab, weight = whole[:, :, 3:9], half(3, 32, 5, 5, 5)
    assert few_out.forward(slab, weight, None, (0, 2, 2)).equal(
        few_out.forward(slab.contiguous(memory_format=torch.channels_last_3d), weight, None, (0, 2, 2))
    )
    given = half(2, 3, 9, 9, 10)[:, :, 2:4]
    assert few_in.can_read(given)
    assert few_out.input_gradient(given, weight, (0, 2, 2)).equal(
        few_out.input_gradient(given.contiguous(memory_format=torch.channels_last_3d), weight, (0, 2, 2))
    )


@pytest.mark.gpu
def test_what_is_not_finite_stays_where_torch_has_it() -> None:
    x, weight = half(1, 16, 6, 7, 9), half(3, 16, 5, 5, 5)
    x[0, 3, 2, 3, 4] = float("inf")
    x[0, 5, 4, 0, 8] = float("nan")
    expected = F.conv3d(x.double(), weight.double(), padding=2)
    assert few_out.forward(x, weight, None, (2, 2, 2)).isfinite().equal(expected.isfinite())
    gradient = half(1, 3, 6, 7, 9)
    gradient[0, 1, 5, 5, 0] = float("nan")
    wanted = F.conv_transpose3d(gradient.double(), weight.double(), padding=2)
    assert few_out.input_gradient(gradient, weight, (2, 2, 2)).isfinite().equal(wanted.isfinite())


def differentiate(
    x: Tensor, weight: Tensor, padding: tuple[int, ...], gradient: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return in float64 the output and the gradient of the weight, and the output's gradient."""
    exact = weight.double().requires_grad_()
    expected = F.conv3d(x.double(), exact, padding=padding)
    gradient = half(*expected.shape, dtype=x.dtype) if gradient is None else gradient
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    return expected.detach(), wanted, gradient


def assert_near_largest(got: Tensor, wanted: Tensor) -> None:
    """Of the largest value: what is added up is of either sign."""
    assert got.shape == wanted.shape
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 2 * ROUNDING[got.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("classes", "kernel", "padding"),
    [(3, (5, 5, 5), (2, 2, 2)), (3, (5, 5, 5), (0, 2, 2)), (2, (4, 4, 4), (1, 2, 1)), (4, (5, 5, 3), (1, 2, 0))],
)
def test_weight_gradient_equals_float64(classes: int, kernel: tuple[int, ...], padding: tuple[int, ...]) -> None:
    x, weight = half(2, 32, 9, 7, 10), half(classes, 32, *kernel)
    _, wanted, gradient = differentiate(x, weight, padding)
    got = few_out.weight_gradient(gradient, x, weight, padding)
    assert_near_largest(got, wanted)
    assert got.equal(few_out.weight_gradient(gradient, x, weight, padding))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "channels", "kernel", "padding"),
    [
        ((9, 1, 20, 28, 20), 16, (5, 5, 5), (2, 2, 2)),
        ((1, 2, 6, 15, 131), 32, (5, 5, 5), (0, 2, 2)),
        ((2, 4, 9, 5, 30), 20, (5, 4, 5), (4, 1, 0)),
        ((1, 6, 7, 8, 9), 64, (4, 4, 4), (2, 2, 1)),
    ],
)
def test_few_channels_in_equal_float64(
    shape: tuple[int, ...], channels: int, kernel: tuple[int, ...], padding: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight = half(*shape, dtype=dtype), half(channels, shape[1], *kernel, dtype=dtype) / 5
    expected, wanted, gradient = differentiate(x, weight, padding)
    got = few_in.forward(x, weight, None, padding)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=1e-4)
    bias = torch.randn(channels, device="cuda").to(dtype)
    got = few_in.forward(x, weight, bias, padding)
    shifted = expected + bias.double().view(-1, 1, 1, 1)
    torch.testing.assert_close(got.double(), shifted, rtol=ROUNDING[dtype], atol=1e-4)
    derived = few_in.weight_gradient(gradient, x, weight, padding)
    assert_near_largest(derived, wanted)
    assert derived.equal(few_in.weight_gradient(gradient, x, weight, padding))
