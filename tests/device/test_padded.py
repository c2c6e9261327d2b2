"""Convolutions with channels of zeros up to a multiple of 32 against torch's own, in float64 on the CPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from volseg.device.convolution import padded
from volseg.device.convolution.settings import Settings

LAST = torch.channels_last_3d


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).contiguous(memory_format=LAST)


def test_multiples() -> None:
    assert [padded.fill_up(channels) for channels in (1, 24, 32, 48, 64, 65)] == [32, 32, 32, 64, 64, 96]


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("changed", [{}, {"dilation": (2, 1, 1)}, {"stride": (2, 2, 2)}], ids=str)
@pytest.mark.parametrize("channels", [(3, 5), (32, 5), (3, 32)])
def test_every_direction_equals_torchs(
    channels: tuple[int, int], changed: dict[str, Any], inputs: bool, outputs: bool, settings: Callable[..., Settings]
) -> None:
    told, wide = settings((1, 1, 1), **changed), {"inputs": inputs, "outputs": outputs}
    slab, weight = draw(2, channels[0], 5, 4, 6), draw(*reversed(channels), 3, 3, 3)
    bias = torch.randn(channels[1], dtype=torch.float64)
    slab[0, 0, 2, 2, 2] = math.inf  # which meets no product that torch has not
    found = padded.forward(slab, weight, bias, told, **wide)
    expected = torch.ops.aten.convolution(slab, weight, bias, *told.arguments)
    torch.testing.assert_close(found, expected, equal_nan=True)
    slab[0, 0, 2, 2, 2] = 0
    gradient = draw(*expected.shape)
    mask = [True, True, False]
    wanted = torch.ops.aten.convolution_backward(gradient, slab, weight, None, *told.arguments, mask)
    torch.testing.assert_close(padded.input_gradient(gradient, slab, weight, told, **wide), wanted[0])
    torch.testing.assert_close(padded.weight_gradient(gradient, slab, weight, told, **wide), wanted[1])
