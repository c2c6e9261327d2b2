"""A kernel that took an output's gradient for dense, which the planes of a tile are not where there are samples.

With ``checkpoint="tiled"`` and two samples a convolution of single voxels got a gradient of its weight that was three
quarters wrong, without a word. One sample's planes are dense, and so is what tests of the kernel gave it.
"""

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, INTERPRETED, with_kernels

from volseg.device import gpus
from volseg.device.convolution import choice
from volseg.device.convolution.choice import ConvolutionCall
from volseg.device.convolution.settings import Settings
from volseg.device.layout import DIM

CONVOLUTIONS = [
    ((20, 16, 1, 1, 1), 1, "few taps"),
    ((32, 1, 3, 3, 3), 1, "few taps"),
    ((16, 1, 5, 5, 5), 1, "few channels in"),
    ((3, 16, 5, 5, 5), 1, "few channels out"),
    ((8, 1, 3, 3, 3), 8, "depthwise"),
    ((3, 16, 1, 1, 1), 1, None),  # whose backward pass is one kernel
    ((3, 3, 3, 3, 3), 1, None),  # of which the input's gradient is ours
]
"""Weights, groups, and who computes the gradient of the weight."""

CLOSE = 2**-9
"""By norm: ours round once to float16, by 2**-11 at most; torch, which computes the rest, adds in float16 on a CPU."""


@with_kernels
@pytest.mark.parametrize(("shape", "groups", "name"), CONVOLUTIONS)
def test_gradients_from_planes_of_two_samples(shape, groups, name, monkeypatch):
    out, own, side, *_ = shape
    around = (side // 2,) * 3
    x, gradient = (torch.randn(2, channels, 6, 5, 7, device=DEVICE).half() for channels in (own * groups, out))
    weight = torch.randn(shape, device=DEVICE).half()
    x, gradient = (volume.contiguous(memory_format=torch.channels_last_3d) for volume in (x, gradient))
    exact = [x[:, :, 1:4].double().requires_grad_(), weight.double().requires_grad_()]
    output = F.conv3d(*exact, padding=around, groups=groups)
    planes = gradient.narrow(DIM, 2, 3)  # both samples are there, and do not lie one behind the other
    wanted = torch.autograd.grad(output, exact, planes.double())
    slab, settings = x.narrow(DIM, 1, 3), Settings((1, 1, 1), around, (1, 1, 1), False, (0, 0, 0), groups)
    if INTERPRETED:
        monkeypatch.setattr(gpus, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(gpus, "get_capability", lambda device: (9, 0))
    call = ConvolutionCall(slab, weight, None, settings, planes)
    found = choice.choose("weight gradient", call)
    assert (None if found is None else found.name) == name
    # Tiles are cut of what `lay_out_gradient` has laid out.
    got = choice.differentiate(planes, slab, weight, None, settings, True, [True, True, False])
    for mine, other in zip(got, wanted, strict=False):
        assert float((mine.double() - other).norm() / other.norm()) < CLOSE
