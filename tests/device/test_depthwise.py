"""Depthwise convolutions' own kernels against convolution in float64."""

from typing import Any

import pytest
import torch
from kernels import DEVICE, fewer, with_kernels
from torch import Tensor

from volseg.device.convolution import depthwise
from volseg.device.convolution.settings import Settings

CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 5, 5, 3, 6), (3, 3, 3), {"padding": (1, 1, 1)}),
    ((1, 40, 5, 4, 3), (3, 3, 3), {"padding": (1, 1, 1), "stride": (2, 2, 2)}),
    ((1, 6, 2, 3, 4), (3, 3, 3), {"padding": (1, 1, 1), "stride": (2, 2, 2), "transposed": True}),
    ((1, 3, 4, 5, 9), (1, 3, 3), {"padding": (0, 0, 2)}),
    ((1, 3, 6, 5, 2), (2, 5, 1), {"padding": (1, 2, 0), "stride": (3, 1, 2)}),
    ((1, 2, 7, 4, 6), (3, 2, 3), {"padding": (2, 0, 1), "dilation": (2, 3, 1), "stride": (1, 1, 2)}),
    ((1, 1, 1, 2, 3), (3, 1, 2), {"stride": (2, 4, 1), "transposed": True, "output_padding": (1, 3, 0)}),
    ((1, 2, 6, 3, 2), (2, 2, 1), {"padding": (4, 1, 0), "transposed": True, "dilation": (4, 2, 1)}),
    ((1, 2, 2, 1, 2), (3, 7, 7), {"padding": (1, 3, 3)}),
    ((2, 96, 20, 17, 33), (3, 3, 3), {"padding": (1, 1, 1)}),
    ((2, 96, 20, 17, 33), (3, 3, 3), {"padding": (1, 1, 1), "stride": (2, 2, 2)}),
    ((2, 96, 10, 9, 7), (3, 3, 3), {"padding": (1, 1, 1), "stride": (2, 2, 2), "transposed": True}),
    ((1, 64, 12, 13, 20), (5, 5, 5), {"padding": (2, 2, 2)}),
    ((1, 33, 12, 13, 20), (5, 5, 5), {"padding": (2, 2, 2), "stride": (2, 2, 2)}),
    ((1, 32, 12, 13, 20), (7, 7, 7), {"padding": (3, 3, 3)}),
    ((1, 32, 12, 13, 20), (7, 7, 7), {"padding": (3, 3, 3), "stride": (2, 2, 2)}),
    ((1, 32, 6, 5, 20), (7, 7, 7), {"padding": (3, 3, 3), "stride": (2, 2, 2), "transposed": True}),
]
"""The first ones by the interpreter too."""


def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    layout = torch.channels_last_3d if len(shape) == 5 else torch.contiguous_format
    return torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=layout)


def make_settings(channels: int, **told: Any) -> Settings:
    zeros, ones = (0, 0, 0), (1, 1, 1)
    plain = {"stride": ones, "padding": zeros, "dilation": ones, "transposed": False, "output_padding": zeros}
    return Settings(**{**plain, **told}, groups=channels)


@with_kernels
@pytest.mark.parametrize(("shape", "kernel", "told"), fewer(CASES, 9), ids=str)
@pytest.mark.parametrize("dtype", fewer([torch.float16, torch.bfloat16], 1), ids=str)
def test_kernels_equal_float64(
    shape: tuple[int, ...], kernel: tuple[int, ...], told: dict[str, Any], dtype: torch.dtype
) -> None:
    settings = make_settings(shape[1], **told)
    x, weight, bias = draw(*shape, dtype=dtype), draw(shape[1], 1, *kernel, dtype=dtype), draw(shape[1], dtype=dtype)
    assert depthwise.fits(weight.shape, settings)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.ops.aten.convolution(*exact, *settings.arguments)
    gradient = draw(*expected.shape, dtype=dtype)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    of_weight = depthwise.weight_gradient(gradient, x, weight, settings)
    assert of_weight.equal(depthwise.weight_gradient(gradient, x, weight, settings))
    of_input = depthwise.input_gradient(gradient, x, weight, settings)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    pairs = (depthwise.forward(x, weight, bias, settings), expected), (of_input, wanted[0]), (of_weight, wanted[1])
    for got, other in pairs:
        assert got.shape == other.shape
        assert got.dtype == dtype
        assert float((got.double() - other.detach()).abs().max()) <= 2 * rounding * float(other.detach().abs().max())
    for got in (pairs[0][0], of_input):
        assert got.is_contiguous(memory_format=torch.channels_last_3d)


@with_kernels
def test_planes_of_wider_volumes_are_read_where_they_lie() -> None:
    x, weight, settings = draw(2, 12, 6, 3, 4), draw(5, 1, 3, 1, 2), make_settings(5, padding=(0, 0, 1))
    part, gradient = x[:, 4:9, 1:5], draw(2, 5, 2, 3, 5)
    dense = part.contiguous(memory_format=torch.channels_last_3d)
    results = [
        (depthwise.forward(given, weight, None, settings), depthwise.weight_gradient(slopes, given, weight, settings))
        for given, slopes in ((dense, gradient), (part, gradient), (dense.contiguous(), gradient.contiguous()))
    ]
    for found in results[1:]:
        assert all(one.equal(other) for one, other in zip(found, results[0], strict=True))


@with_kernels
def test_voxels_that_nothing_reads_may_hold_anything() -> None:
    x, weight, settings = draw(1, 3, 4, 4, 4), draw(3, 1, 1, 1, 1), make_settings(3, stride=(2, 3, 3))
    x[:, :, 3], x[:, :, :, 2], x[..., 1] = torch.nan, torch.inf, torch.nan
    out = depthwise.forward(x, weight, None, settings)
    assert out.isfinite().all()
    assert depthwise.weight_gradient(out, x, weight, settings).isfinite().all()
    gradient = depthwise.input_gradient(out, x, weight, settings)
    assert not gradient[:, :, 1::2].any()  # what nothing reads has none
