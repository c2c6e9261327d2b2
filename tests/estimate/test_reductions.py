"""Partial sums of reductions, to the byte of an H200's account of a SwinUNETR's and a V-Net's steps."""

import pytest
import torch

from volseg.estimate.reductions import count_partial_sums

PROCESSORS = 132


@pytest.mark.parametrize(
    ("shape", "dims", "measured"),
    [
        ((3456, 768), {0}, 21_233_664),
        ((5488, 192), {0}, 8_454_144),
        ((5488, 576), {0}, 25_362_432),
        ((3456, 192), {0}, 5_308_416),
        ((235_298, 144), {0}, 77_856_768),
        ((6912, 48), {0}, 165_888),
        ((16, 12, 343, 343), {0}, 0),
    ],
)
def test_sums_over_rows_take_what_was_measured(shape, dims, measured):
    values = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    assert count_partial_sums(values, dims, PROCESSORS) == measured


def test_a_sum_over_volumes_takes_a_value_for_each_block():
    """Three classes of 96^3: torch asked for 2,560 bytes, its blocks' sizes being multiples of 512."""
    values = torch.empty(2, 3, 96, 96, 96, device="meta")
    assert count_partial_sums(values, {0, 2, 3, 4}, PROCESSORS) == 176 * 3 * 4


@pytest.mark.parametrize(("shape", "dims"), [((0, 4), {0}), ((4, 4), set()), ((), set()), ((1, 1), {0, 1})])
def test_what_needs_no_parts_takes_nothing(shape, dims):
    assert count_partial_sums(torch.empty(shape, device="meta"), dims, PROCESSORS) == 0
