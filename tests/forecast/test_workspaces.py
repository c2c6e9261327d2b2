"""cuDNN's workspaces: what an H200's account of a step says, and what follows from the rule for others."""

import pytest
import torch

from volseg.forecast.outside import find_outside
from volseg.forecast.trace import Allocate, KernelRun, StepTrace
from volseg.forecast.workspaces import find_workspace, find_workspace_of_weights

BF16, FP32 = torch.bfloat16, torch.float32


def sizes(batch, inputs, outputs, kernel, side, out_side=None):
    """Return the sizes of input, output and weight."""
    return (
        torch.Size([batch, inputs, *[side] * 3]),
        torch.Size([batch, outputs, *[out_side or side] * 3]),
        torch.Size([outputs, inputs, *[kernel] * 3]),
    )


# Bytes that torch's allocator was asked for, with what cuDNN adds for itself: less than 512.
MEASURED = [
    (sizes(2, 32, 32, 3, 128), BF16, 536_926_224, 543_006_359),
    (sizes(2, 64, 32, 3, 128), BF16, 805_417_107, 807_186_931),
    (sizes(2, 32, 64, 3, 128, 64), BF16, 335_655_059, 337_130_007),
    (sizes(2, 320, 320, 3, 8), BF16, 6_840_336, 6_840_336),
    (sizes(2, 32, 3, 1, 128), BF16, 16, 336_594_099),
    (sizes(2, 32, 32, 3, 128), FP32, 2**30 + 110_592, 1_083_947_655),
]


@pytest.mark.parametrize(("given", "dtype", "forward", "weights"), MEASURED)
def test_what_was_measured_is_given_within_a_block(given, dtype, forward, weights):
    assert 0 <= find_workspace(*given, dtype, channels_last=False) - forward <= 512
    assert 0 <= find_workspace_of_weights(*given, dtype, channels_last=False) - weights <= 512


def test_volumes_with_channels_last_are_not_copied():
    given = sizes(2, 32, 32, 3, 128)
    assert find_workspace(*given, BF16, channels_last=True) == 512
    assert find_workspace_of_weights(*given, BF16, channels_last=True) == 6_080_151 + 512


def test_channels_are_filled_up():
    """Three classes are copied as eight channels of two bytes each, as the account of a V-Net's last layer says."""
    given = sizes(2, 32, 3, 5, 128)
    volumes = (32 + 8) * 2 * 128**3 * 2
    assert find_workspace(*given, BF16, channels_last=False) == volumes + 32 * 8 * 125 * 2 + 512


def test_sums_of_channels_that_were_not_measured_are_guessed():
    """24 x 48 channels make eight tiles of a weight of 27 voxels: 15 of each fill the GPU."""
    given = sizes(2, 24, 48, 3, 64)
    assert find_workspace_of_weights(*given, BF16, channels_last=True) == 15 * 27 * 24 * 48 * 4 + 512


def test_outside_counts_what_a_step_uses():
    plain = StepTrace((Allocate(0, 512),))
    product = KernelRun("aten.addmm", BF16, 1, 1)
    side = Allocate(1, 512, stream=1)
    assert find_outside(plain) < find_outside(StepTrace((product,)))
    assert find_outside(plain) < find_outside(StepTrace((side,))) < find_outside(plain, processes=2)
