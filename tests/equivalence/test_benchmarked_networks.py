"""The networks of the speed benchmark are exact with the fast kernels' functions and in slabs.

Small ones of the same classes as ``workflows/benchmarks/networks.py`` measures: outputs, every gradient, buffers, and a
second step, in training and in evaluation.
"""

import sys
from pathlib import Path

import pytest
import torch
from beside_plain import WAYS, check_beside_plain
from monai.networks.nets import VNet
from narrow_vnet import NarrowVNet

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from networks_listed import NETWORKS, build, fit

SIDES = (32, 16, 16)
"""Four halvings leave two voxels, which norms over instances need."""

WIDE = {"SwinUNETR": (64, 32, 32), "UNETR": (16, 16, 16)}

SLOW = ("VNet", "SwinUNETR")
"""V-Net has 45 million parameters however it is asked for; SwinUNETR takes no volume of less than 64 x 32 x 32."""

LISTED = [
    pytest.param(name, way, marks=pytest.mark.slow if name in SLOW or (row + column) % 2 else ())
    for row, name in enumerate(NETWORKS)
    for column, way in enumerate(("fast", "two"))
]
"""Each network runs in one of the two ways quickly, in the other slowly: one shard goes the way of two."""


@pytest.mark.parametrize(("name", "way"), LISTED)
def test_a_network_equals_the_plain_one(name, way):
    sides = WIDE.get(name, SIDES)
    image = torch.randn(1, 1, *sides, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    check_beside_plain(build(name, sides, small=True).double(), WAYS[way], image)


def test_sides_are_those_that_a_network_takes():
    assert fit("SwinUNETR", (32, 16, 128)) == (64, 32, 128)
    assert fit("DynUNet", (32, 32, 32)) == (32, 32, 32)


# The narrow V-Net is MONAI's but for its width.


def test_the_narrow_vnet_is_monais_but_for_its_width() -> None:
    with torch.device("meta"):
        theirs = VNet(3, 1, 2, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0))
    ours = NarrowVNet()
    assert [(name, type(part)) for name, part in ours.named_modules()][1:] == [
        (name, type(part)) for name, part in theirs.named_modules()
    ][1:]
    wide = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    for name, tensor in ours.state_dict().items():
        assert all(mine in (theirs, theirs // 8) for mine, theirs in zip(tensor.shape, wide[name], strict=True))
    assert [*wide] == [*ours.state_dict()]
