"""With a single shard nothing is cut: operators along the depth pad in one kernel."""

import pytest
import torch
from beside_plain import Counted
from torch.nn import functional as F

from volseg.parallel import FastKernels


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.randn(2, 3, 3, 3, 3, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scale = torch.nn.Parameter(torch.randn(2, 1, 1, 1, dtype=torch.float64))

    def forward(self, x):
        return self.function(x * self.scale, self)


CALLS = {
    "transposed": lambda x, net: F.conv_transpose3d(x, net.weight, net.bias, 2, 1, 1),
    "same": lambda x, net: F.conv3d(x, net.weight.transpose(0, 1), padding="same"),
    "interpolated": lambda x, net: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "interpolated, corners": lambda x, net: F.interpolate(x, size=(9, 7, 5), mode="trilinear", align_corners=True),
    "nearest": lambda x, net: F.interpolate(x, scale_factor=2),
    "pooled": lambda x, net: F.max_pool3d(x, 3, 2, 1),
    "averaged": lambda x, net: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "padded": lambda x, net: F.pad(x, (1, 0, 2, 1, 0, 3)),
    "mirrored": lambda x, net: F.pad(x, (1, 1, 2, 1, 1, 2), mode="reflect"),
    "rolled": lambda x, net: x.roll((2, -1), (2, 3)),
    "flipped": lambda x, net: x.flip(2),
    "sliced": lambda x, net: x[:, :, 1:6:2],
}


def run(model, image):
    """Return outputs and gradients, and the operators that ran forward and backward."""
    with Counted() as counted:
        out = model(image)
        out.square().sum().backward()
    return [out, *(parameter.grad for parameter in model.parameters())], counted.names


def test_padding_by_nothing_has_no_gradient_of_its_own():
    net = Calls(lambda x, net: F.pad(x, (0,) * 6, mode="replicate"))
    _, ours = run(FastKernels(net, "cpu"), torch.randn(1, 2, 8, 6, 4, dtype=torch.float64))
    assert "replication_pad3d_backward" not in ours


@pytest.mark.parametrize("name", CALLS)
def test_an_only_shard_runs_the_plain_operator(name):
    net = Calls(CALLS[name])
    image = torch.randn(1, 2, 8, 6, 4, dtype=torch.float64)
    expected, plain = run(net, image)
    net.zero_grad()
    found, ours = run(FastKernels(net, "cpu"), image)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    padded = {"constant_pad_nd", "index_select", "slice_backward", "lerp", "cat"}
    assert sorted(padded & set(ours)) == sorted(padded & set(plain))
