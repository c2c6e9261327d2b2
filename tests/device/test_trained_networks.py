"""Networks with our kernels train as in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks.nets.attentionunet import AttentionBlock
from torch import Tensor, nn

from volseg.device.convolution import many_taps

Beside = Callable[..., list[tuple[Tensor, Tensor]]]


class Gate(nn.Module):
    """MONAI's attention block, of one volume with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = AttentionBlock(3, f_int=16, f_g=32, f_l=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(g=x, x=x)


def gates() -> list[nn.Module]:
    return [nn.Conv3d(1, 32, 3, padding=1), nn.ReLU(), Gate(), nn.Conv3d(32, 2, 3, padding=1)]


def few_out() -> list[nn.Module]:
    first, last = nn.Conv3d(1, 16, 5, padding=2), nn.Conv3d(16, 3, 5, padding=2)
    return [first, nn.InstanceNorm3d(16), nn.ELU(), last, nn.BatchNorm3d(3), nn.Conv3d(3, 3, 1)]


def few_taps() -> list[nn.Module]:
    first = nn.Conv3d(1, 32, 3, padding=1, bias=False)
    return [first, nn.InstanceNorm3d(32), nn.LeakyReLU(), nn.Conv3d(32, 2, 1)]


def strided_first() -> list[nn.Module]:
    first, last = nn.Conv3d(1, 32, 3, stride=2, padding=1), nn.ConvTranspose3d(32, 3, 2, 2)
    return [first, nn.InstanceNorm3d(32), nn.LeakyReLU(), last, nn.Conv3d(3, 3, 3, padding=1)]


def one_voxel() -> list[nn.Module]:
    return [nn.Conv3d(1, 32, 3, padding=1), nn.InstanceNorm3d(32), nn.LeakyReLU(), nn.Conv3d(32, 3, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layers", "checkpoint", "share", "absolute", "least"),
    [
        (gates, None, 0.1, 0.0, 1e-9),
        (few_out, None, 0.05, 0.0, 1e-9),
        (few_taps, None, 0.05, 0.0, 0.0),
        (strided_first, None, 0.05, 0.0, 1e-9),
        (one_voxel, None, 0.05, 1e-4, 0.0),
        (one_voxel, "all", 0.05, 1e-4, 0.0),
    ],
)
def test_a_network_trains_as_in_float64(layers, checkpoint, share, absolute, least, beside_float64):
    """bfloat16 has three digits. A bias in front of a norm has no gradient (``least``), or rounding (``absolute``)."""
    pairs = beside_float64(layers, torch.randn(2, 1, 8, 12, 10, device="cuda"), checkpoint)
    for one, other in pairs:
        if float(other.norm()) >= least:
            assert float((one - other).norm()) < share * float(other.norm()) + absolute


def assert_near(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """bfloat16 has three digits, and the gradient of a bias before a norm is only rounding."""
    largest = max(float(wanted.norm()) for _, wanted in pairs)
    for one, other in pairs:
        assert float((one - other).norm()) < 0.05 * max(float(other.norm()), 1e-2 * largest)


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "sides"), [(128, (12, 14, 16)), (64, (16, 32, 32)), (32, (16, 32, 32))])
def test_a_network_trains_with_many_taps(channels, sides, beside_float64, monkeypatch):
    asked: list[int] = []

    def note(*given: Any) -> Tensor:
        asked.append(many_taps.count_group(given[2]))
        return compute(*given)

    compute = many_taps.weight_gradient
    monkeypatch.setattr(many_taps, "weight_gradient", note)

    def layers() -> list[nn.Module]:
        first = [nn.Conv3d(1, channels, 3, padding=1), nn.InstanceNorm3d(channels), nn.PReLU(channels)]
        second = [nn.Conv3d(channels, channels, 5, padding=2), nn.BatchNorm3d(channels), nn.ELU()]
        return [*first, *second, nn.Conv3d(channels, 3, 5, padding=2)]

    assert_near(beside_float64(layers, torch.randn(2, 1, *sides, device="cuda")))
    if torch.cuda.get_device_capability()[0] == many_taps.WIDE:
        assert asked == [many_taps.GROUPS.get(channels, 1)]
