"""Wide convolutions' own kernels against convolution in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernels import half
from torch import Tensor, nn

from volseg.device.convolution import many_taps

SHAPES = {
    "even": ((1, 128, 8, 8, 8), 128, (2, 2, 2)),
    "slab with its halo": ((1, 128, 8, 6, 7), 160, (0, 2, 2)),
    "two samples, channels that no tile divides": ((2, 144, 5, 7, 3), 136, (2, 1, 3)),
    "one plane": ((3, 128, 1, 4, 5), 128, (2, 2, 2)),
}


@pytest.mark.parametrize("padding", [(2, 2, 2), (0, 1, 4)])
def test_forward_is_the_input_gradient_of_the_flipped_kernel(padding: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(2, 3, 6, 7, 5).double(), torch.randn(4, 3, 5, 5, 5).double(), torch.randn(4).double()
    got = many_taps.forward(x, weight, bias, padding)
    torch.testing.assert_close(got, F.conv3d(x, weight, bias, padding=padding))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_float64(name: str, dtype: torch.dtype) -> None:
    shape, out, padding = SHAPES[name]
    x, weight = half(*shape, dtype=dtype), half(out, shape[1], 5, 5, 5, dtype=dtype)
    exact = weight.double().requires_grad_()
    expected = F.conv3d(x.double(), exact, padding=padding)
    gradient = half(*expected.shape, dtype=dtype)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    got = many_taps.forward(x, weight, None, padding)
    derived = many_taps.weight_gradient(gradient, x, weight, padding)
    assert derived.equal(many_taps.weight_gradient(gradient, x, weight, padding))
    assert derived.is_contiguous(memory_format=torch.channels_last_3d)
    for value, other in ((got, expected.detach()), (derived, wanted)):
        assert value.shape == other.shape
        assert float((value.double() - other).abs().max() / other.abs().max()) < 2 * rounding


@pytest.mark.gpu
def test_a_network_trains_with_them(beside_float64: Callable[..., list[tuple[Tensor, Tensor]]]) -> None:
    def layers() -> list[nn.Module]:
        first = [nn.Conv3d(1, 128, 3, padding=1), nn.InstanceNorm3d(128), nn.PReLU(128)]
        second = [nn.Conv3d(128, 128, 5, padding=2), nn.BatchNorm3d(128), nn.ELU()]
        return [*first, *second, nn.Conv3d(128, 3, 5, padding=2)]

    pairs = beside_float64(layers, torch.randn(2, 1, 12, 14, 16, device="cuda"))
    largest = max(float(wanted.norm()) for _, wanted in pairs)
    for one, other in pairs:
        # bfloat16 has three digits; of a bias in front of a norm nothing but rounding is left.
        assert float((one - other).norm()) < 0.05 * max(float(other.norm()), 1e-2 * largest)
