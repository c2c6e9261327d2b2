"""A convolution of a stack of planes at a time equals the whole one."""

import pytest
import torch

from volseg.device.convolution.depth_chunks import convolve, differentiate


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (5, 1, 2, 1), (1, 1, 0, 1), (3, 1, 2, 2), (1, 1, 2, 1), (3, 2, 6, 1)],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_stacks_equal_the_whole(batch, kernel, stride, padding, dilation, layout):
    arguments = [[stride] * 3, [padding] * 3, [dilation] * 3, False, [0] * 3, 1]
    slab = torch.randn(batch, 4, 23, 6, 7, dtype=torch.float64).to(memory_format=layout)
    weight = torch.randn(6, 4, *[kernel] * 3, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    expected = torch.ops.aten.convolution(slab, weight, bias, *arguments)
    for limit in (slab.numel() // 5, slab.numel() // 2, 1):
        torch.testing.assert_close(convolve(slab, weight, bias, arguments, limit), expected)
    gradient = torch.randn_like(expected)
    mask = [True, True, True]
    derived = torch.ops.aten.convolution_backward(gradient, slab, weight, [6], *arguments, mask)
    for limit in (slab.numel() // 5, 1):
        found = differentiate(gradient, slab, weight, [6], arguments, mask, limit)
        torch.testing.assert_close(list(found), list(derived))
