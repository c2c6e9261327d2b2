"""Plans for stacks of thick slices.

A V-Net planned for cardiac MR of nine slices halved them four times, as MONAI's does: sixteen with padding, then one.
It came to 74.9 points of Dice where the U-Net, whose plan follows the spacing, came to 88.1, and its loss of 0.13 hid
that: the background took part in the mean of Dice, and nothing else was told of the training.
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
    assert planned.geometry.patch == plan(CARDIAC, "unet").geometry.patch == (224, 256, 10)
    with torch.device("meta"):
        net = build_network(planned.config().network.spec(), in_channels=1, out_channels=4)
    assert grid_divisors(net) == (16, 16, 2)
    first = net.in_tr.conv_block.conv
    assert (first.kernel_size, first.padding) == ((5, 5, 1), (2, 2, 0))


def test_the_planned_loss_is_of_the_foreground():
    [loss] = plan(CARDIAC, "vnet").config().losses
    assert loss.spec() == {"name": "DiceCELoss", "include_background": False}
