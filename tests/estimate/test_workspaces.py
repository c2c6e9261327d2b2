"""cuDNN's workspaces: those measured on an H200, and those that the rule gives for other GPUs."""

import pytest
import torch

from volseg.estimate.step_memory import estimate_cuda_overhead
from volseg.estimate.trace import Allocate, KernelRun, StepTrace
from volseg.estimate.workspaces import estimate_workspace

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
    assert -512 <= estimate_workspace("forward", *given, dtype, strided=is_strided(given)) - forward <= 512
    assert -512 <= estimate_workspace("weight_gradient", *given, dtype, strided=is_strided(given)) - weights <= 512


def is_strided(given):
    return given[0][2] != given[1][2]


def test_volumes_with_channels_last_are_not_copied():
    given = sizes(2, 32, 32, 3, 128)
    assert estimate_workspace("forward", *given, BF16, channels_last=True) <= 512
    assert abs(estimate_workspace("weight_gradient", *given, BF16, channels_last=True) - 6_080_512) <= 512


def test_float32_is_copied_though_channels_are_last():
    """Slabs of a V-Net in float32 on an H200: input and weight, and the output too from 64 channels on."""
    given = torch.Size([4, 32, 36, 256, 160]), torch.Size([4, 32, 32, 256, 160]), torch.Size([32, 32, 5, 5, 5])
    assert abs(estimate_workspace("forward", *given, FP32, channels_last=True) - 754_974_720 - 512_000) <= 512
    given = torch.Size([4, 64, 20, 128, 80]), torch.Size([4, 64, 16, 128, 80]), torch.Size([64, 64, 5, 5, 5])
    copies = 209_715_200 + 167_772_160 + 2_048_000
    assert abs(estimate_workspace("forward", *given, FP32, channels_last=True) - copies) <= 512


def test_channels_are_filled_up():
    """Three classes are copied as eight 2-byte channels, as in the memory account of V-Net's last layer."""
    given = sizes(2, 32, 3, 5, 128)
    volumes = (32 + 8) * 2 * 128**3 * 2
    assert 0 <= estimate_workspace("forward", *given, BF16) - volumes - 32 * 8 * 125 * 2 <= 512


def test_copies_grow_with_the_volume_that_was_not_measured():
    """Of the nearest shape that was measured the copies are taken over by their names, and the rest in bytes."""
    small, large = (
        estimate_workspace("input_gradient", *sizes(1, 40, 40, 3, side), BF16) - 40 * 40 * 27 * 2 for side in (100, 200)
    )
    assert small == pytest.approx(2 * 40 * 100**3 * 2, abs=512)
    assert large == pytest.approx(8 * small, abs=4096)


def test_a_kind_that_was_not_measured_is_taken_as_that_which_is_most_like_it():
    """Transposed without a stride: no shape of the table is."""
    assert estimate_workspace("forward", *sizes(2, 32, 32, 3, 64), BF16, transposed=True) > 0


def test_outside_counts_what_a_step_uses():
    plain = StepTrace((Allocate(0, 512),))
    product = KernelRun("aten.addmm", BF16, 1, 1)
    side = Allocate(1, 512, stream=1)
    assert estimate_cuda_overhead(plain) < estimate_cuda_overhead(StepTrace((product,)))
    assert (
        estimate_cuda_overhead(plain)
        < estimate_cuda_overhead(StepTrace((side,)))
        < estimate_cuda_overhead(plain, processes=2)
    )
