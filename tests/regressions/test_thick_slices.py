"""Plans for stacks of thick slices.

A V-Net planned for cardiac MR of nine slices padded them to sixteen and halved them to one, as MONAI's does. It reached
74.9 points of Dice where the U-Net, whose plan follows the spacing, reached 88.1. Its loss of 0.13 hid that, as the
background took part in the mean of Dice.
"""

import torch

from volseg.models import build_network, grid_divisors
from volseg.planning import CaseSizes, Fingerprint, plan

CARDIAC = Fingerprint(
    task="Cardiac",
    channels=("MRI",),
    labels={0: "background", 1: "right ventricle", 2: "myocardium", 3: "left ventricle"},
    cases=tuple(CaseSizes(case=f"case {i}", shape=(216, 256, 9), spacing=(1.5, 1.5, 10.0)) for i in range(100)),
)


def test_a_vnet_halves_nine_slices_of_ten_millimetres_once():
    planned = plan(CARDIAC, "vnet")
    config = planned.config()
    assert config.inference.window == config.patch.size == plan(CARDIAC, "unet").geometry.patch == (224, 256, 10)
    network = config.network.spec()
    assert network["strides"] == [[1, 1, 1], [2, 2, 1], [2, 2, 1], [2, 2, 2], [2, 2, 1]]
    assert network["kernel_size"] == [[5, 5, 1], [5, 5, 1], [5, 5, 5], [5, 5, 5], [5, 5, 5]]
    with torch.device("meta"):
        net = build_network(network, in_channels=1, out_channels=4)
    assert grid_divisors(net) == (16, 16, 2)
    first = net.in_tr.conv_block.conv
    assert (first.kernel_size, first.padding) == ((5, 5, 1), (2, 2, 0))
