"""Convolutions as input gradients of others, and the other way round, against torch's own."""

from dataclasses import replace

import pytest
import torch
from kernels import half
from torch import Tensor

from volseg.device.convolution import choice, flipped_weights, rules
from volseg.device.convolution.forms import Turned
from volseg.device.convolution.settings import Settings

LAST = torch.channels_last_3d
SETTINGS = Settings((1, 1, 1), (0, 0, 0), (1, 1, 1), False, (0, 0, 0), 1)

KERNELS = {
    "5": ((5, 5, 5), (2, 2, 2), (1, 1, 1)),
    "no padding": ((3, 3, 3), (0, 0, 0), (1, 1, 1)),
    "as much padding as the kernel reaches": ((3, 2, 4), (2, 1, 3), (1, 1, 1)),
    "uneven": ((1, 2, 5), (0, 1, 2), (1, 1, 1)),
    "dilation": ((3, 3, 3), (2, 1, 3), (2, 1, 3)),
    "planes of a halo": ((5, 3, 3), (0, 1, 1), (1, 1, 1)),
}
GROUPED = ["5", "uneven", "dilation", "planes of a halo"]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).contiguous(memory_format=LAST)


@pytest.mark.parametrize("laid", [LAST, torch.contiguous_format], ids=str)
@pytest.mark.parametrize(
    ("name", "voxels"), [*((name, 1) for name in KERNELS), *((name, 2) for name in GROUPED), ("5", 4)]
)
def test_both_directions_equal_torchs(name: str, voxels: int, laid: torch.memory_format) -> None:
    kernel, padding, dilation = KERNELS[name]
    settings = replace(SETTINGS, padding=padding, dilation=dilation)
    slab, bias = draw(2, 3, 9, 10, 16), torch.randn(5, dtype=torch.float64)
    weight = draw(5, 3, *kernel).contiguous(memory_format=laid)
    expected = torch.ops.aten.convolution(slab, weight, bias, *settings.arguments)
    gradient, mask = draw(*expected.shape), [True, False, False]
    of_input, *_ = torch.ops.aten.convolution_backward(gradient, slab, weight, None, *settings.arguments, mask)
    got = flipped_weights.forward(slab, weight, bias, settings, voxels)
    derived = flipped_weights.input_gradient(gradient, weight, settings, voxels)
    for one, other in ((got, expected), (derived, of_input)):
        assert one.is_contiguous(memory_format=LAST)
        torch.testing.assert_close(one, other)


def test_turned_round_twice_a_weight_is_as_it_was() -> None:
    weight = torch.randn(4, 6, 5, 2, 3)
    once = flipped_weights.turn_round(weight)
    assert once.shape == (6, 4, 5, 2, 3)
    assert once[5, 3, 0, 1, 2].equal(weight[3, 5, 4, 0, 0])
    assert flipped_weights.turn_round(once).equal(weight)


def test_no_weights_gradient_is_computed_so() -> None:
    call = rules.ConvolutionCall(draw(1, 2, 4, 4, 4), draw(2, 2, 3, 3, 3), None, SETTINGS, draw(1, 2, 2, 2, 2))
    with pytest.raises(AssertionError):
        choice.compute_in_form(Turned(), "weight gradient", call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("laid", [LAST, torch.contiguous_format], ids=str)
def test_the_kernel_moves_every_value(dtype: torch.dtype, laid: torch.memory_format) -> None:
    for outputs, inputs, *kernel in ((64, 64, 5, 5, 5), (130, 70, 3, 1, 2), (1, 3, 5, 5, 5), (320, 256, 3, 3, 3)):
        weight = half(outputs, inputs, *kernel, dtype=dtype).contiguous(memory_format=laid)
        got = flipped_weights.turn_round(weight)
        assert got.is_contiguous(memory_format=LAST)
        assert got.equal(weight.flip(2, 3, 4).transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("voxels", [1, 2])
def test_halves_are_as_near_to_float64_as_torchs(dtype: torch.dtype, voxels: int) -> None:
    settings = replace(SETTINGS, padding=(2, 2, 2))
    x, weight = half(2, 64, 12, 10, 16, dtype=dtype), half(64, 64, 5, 5, 5, dtype=dtype)
    bias = torch.randn(64, device="cuda").to(dtype)
    exact = [tensor.double() for tensor in (x, weight, bias)]
    exact[0].requires_grad_()
    expected = torch.ops.aten.convolution(*exact, *settings.arguments)
    gradient = half(*expected.shape, dtype=dtype)
    (wanted,) = torch.autograd.grad(expected, exact[0], gradient.double())
    got = flipped_weights.forward(x, weight, bias, settings, voxels)
    derived = flipped_weights.input_gradient(gradient, weight, settings, voxels)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32, and of the bias's sum
    for value, other in ((got, expected.detach()), (derived, wanted)):
        assert float((value.double() - other).abs().max() / other.abs().max()) < 2 * rounding
