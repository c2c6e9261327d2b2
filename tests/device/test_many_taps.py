"""Wide convolutions' own kernels against convolution in float64."""

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, INTERPRETED, half, with_kernels

from volseg.device.convolution import many_taps

SHAPES = {
    "even": ((1, 128, 8, 8, 8), 128, (2, 2, 2)),
    "slab with its halo": ((1, 128, 8, 6, 7), 160, (0, 2, 2)),
    "two samples, channels that no tile divides": ((2, 144, 5, 7, 3), 136, (2, 1, 3)),
    "one plane": ((3, 128, 1, 4, 5), 128, (2, 2, 2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_float64(name: str, dtype: torch.dtype) -> None:
    shape, out, padding = SHAPES[name]
    x, weight = half(*shape, dtype=dtype), half(out, shape[1], 5, 5, 5, dtype=dtype)
    exact = weight.double().requires_grad_()
    expected = F.conv3d(x.double(), exact, padding=padding)
    gradient = half(*expected.shape, dtype=dtype)
    (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    derived = many_taps.weight_gradient(gradient, x, weight, padding)
    assert derived.equal(many_taps.weight_gradient(gradient, x, weight, padding))
    assert derived.is_contiguous(memory_format=torch.channels_last_3d)
    assert derived.shape == wanted.shape
    assert float((derived.double() - wanted).abs().max() / wanted.abs().max()) < 2 * rounding


GROUPED = {
    "fours": ((2, 32, 3, 4, 8), 32, (5, 5, 5), (2, 2, 2), 4),
    "pairs": ((1, 64, 3, 4, 6), 64, (3, 5, 5), (1, 2, 2), 2),
    "fours of a line that reaches beyond": ((1, 32, 2, 3, 4), 32, (1, 3, 5), (0, 1, 4), 4),
    "no padding": ((1, 64, 3, 4, 6), 64, (1, 1, 3), (0, 0, 0), 2),
    "eights": ((1, 16, 2, 3, 16), 16, (1, 3, 5), (0, 1, 2), 8),
    "more channels out": ((1, 32, 2, 2, 8), 64, (1, 2, 7), (0, 1, 3), 2),
    "a slab with its halo": ((2, 32, 6, 2, 4), 32, (5, 1, 5), (0, 0, 2), 4),
}
TILES = {
    "one of each": {"BO": 128, "BT": 1},
    "two taps": {"BO": 128, "BT": 2},
    "twice as many rows": {"BO": 256, "BT": 1},
}
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


@with_kernels
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", GROUPED)
def test_groups_equal_float64_in_each_tile(name: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_taps, "_choose_tile", lambda rows, device: (TILES[tile], 60))
    monkeypatch.setattr(many_taps, "FEWEST_TILES", 1)
    monkeypatch.setattr(many_taps, "BV", 32)  # places are dealt among several programs
    shape, out, kernel, padding, voxels = GROUPED[name]
    for dtype in HALVES:
        x, weight = (
            torch.randn(of, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last_3d)
            for of in (shape, (out, shape[1], *kernel))
        )
        exact = weight.double().requires_grad_()
        expected = F.conv3d(x.double(), exact, padding=padding)
        gradient = torch.randn(expected.shape, device=DEVICE).to(dtype)
        (wanted,) = torch.autograd.grad(expected, exact, gradient.double())
        got = many_taps.weight_gradient(gradient, x, weight, padding, voxels)
        assert got.shape == wanted.shape
        assert got.dtype == dtype
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 2 * rounding


def test_places_are_dealt_in_whole_waves_where_each_program_has_enough() -> None:
    for results, tiles, parts in (
        (63, 2048, 2),  # 126 of 132 at a time, and no number of waves is fuller
        (25, 8192, 21),  # 525 in four waves of 132
        (25, 1024, 5),  # which would be too little for each
        (25, 30, 3),  # eight tiles for each
        (38, 2048, 10),
        (38, 256, 3),
        (250, 64, 1),  # twice as many as run at a time
        (1000, 4, 1),
    ):
        assert many_taps._count_parts(results, 132, tiles) == parts, (results, tiles)
