"""Our convolution kernels against float64: large cases on a GPU, and special cases of some kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_cases import Case, check, draw, list_large
from kernels import DEVICE, INTERPRETED, with_kernels
from torch import Tensor

from volseg.device.convolution import choice, depthwise, few_in, few_out, many_taps, one_voxel
from volseg.device.convolution.settings import Settings

HALF = torch.float16
HALVES = [HALF] if INTERPRETED else [HALF, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "case"), list_large())
def test_kernels_equal_float64(name: str, case: Case, dtype: torch.dtype) -> None:
    check(name, case, dtype)


GROUPED = {
    "fours": Case((2, 32, 3, 4, 8), (32, 32, 5, 5, 5), (2, 2, 2), voxels=4),
    "pairs": Case((1, 64, 3, 4, 6), (64, 64, 3, 5, 5), (1, 2, 2), voxels=2),
    "fours of a line that reaches beyond": Case((1, 32, 2, 3, 4), (32, 32, 1, 3, 5), (0, 1, 4), voxels=4),
    "no padding": Case((1, 64, 3, 4, 6), (64, 64, 1, 1, 3), voxels=2),
    "eights": Case((1, 16, 2, 3, 16), (16, 16, 1, 3, 5), (0, 1, 2), voxels=8),
    "more channels out": Case((1, 32, 2, 2, 8), (64, 32, 1, 2, 7), (0, 1, 3), voxels=2),
    "a slab with its halo": Case((2, 32, 6, 2, 4), (32, 32, 5, 1, 5), (0, 0, 2), voxels=4),
}
TILES = {
    "one of each": {"BO": 128, "BT": 1},
    "two taps": {"BO": 128, "BT": 2},
    "twice as many rows": {"BO": 256, "BT": 1},
}


@with_kernels
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", GROUPED)
def test_groups_equal_float64_in_each_tile(name: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_taps, "_choose_tile", lambda rows, device: (TILES[tile], 60))
    monkeypatch.setattr(many_taps, "FEWEST_TILES", 1)
    monkeypatch.setattr(many_taps, "BV", 32)  # places are dealt among several programs
    for dtype in HALVES:
        check("many_taps", GROUPED[name], dtype)


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


@with_kernels
def test_planes_may_be_far_apart() -> None:
    """One sample with a 64-bit stride: positions before its first plane overflow 32 bits."""
    plane, reach = 2**26, 32
    x = torch.zeros(plane + 1, dtype=HALF, device=DEVICE).as_strided((1, 1, 2, 1, 1), (2**31, 1, plane, 1, 1))
    x[0, 0, :, 0, 0] = torch.tensor([1.0, 2.0])
    weight, padding = draw((16, 1, 2 * reach + 1, 1, 1), HALF), (reach, 0, 0)
    settings = Case(tuple(x.shape), tuple(weight.shape), padding).settings
    assert few_in.can_read(x)
    exact = weight.double().requires_grad_()
    wanted = F.conv3d(x.double(), exact, padding=padding)
    gradient = draw(wanted.shape, HALF)
    (of_weight,) = torch.autograd.grad(wanted, exact, gradient.double())
    derived = few_in.weight_gradient(gradient, x, weight, settings)
    for got, other in ((few_in.forward(x, weight, None, settings), wanted.detach()), (derived, of_weight)):
        torch.testing.assert_close(got.double(), other, rtol=2**-10, atol=2**-10)


@with_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the interpreter
def test_what_is_not_finite_stays_where_torch_has_it() -> None:
    x, weight = draw((1, 16, 6, 7, 9), HALF), draw((3, 16, 5, 5, 5), HALF)
    x[0, 3, 2, 3, 4] = float("inf")
    x[0, 5, 4, 0, 8] = float("nan")
    expected = F.conv3d(x.double(), weight.double(), padding=2)
    settings = Case(tuple(x.shape), tuple(weight.shape), (2, 2, 2)).settings
    assert few_out.forward(x, weight, None, settings).isfinite().equal(expected.isfinite())
    gradient = draw((1, 3, 6, 7, 9), HALF)
    gradient[0, 1, 5, 5, 0] = float("nan")
    wanted = F.conv_transpose3d(gradient.double(), weight.double(), padding=2)
    assert few_out.input_gradient(gradient, x, weight, settings).isfinite().equal(wanted.isfinite())


@with_kernels
def test_voxels_that_nothing_reads_may_hold_anything() -> None:
    x, weight = draw((1, 3, 4, 4, 4), HALF), draw((3, 1, 1, 1, 1), HALF)
    settings = Case(tuple(x.shape), tuple(weight.shape), stride=(2, 3, 3)).settings
    x[:, :, 3], x[:, :, :, 2], x[..., 1] = torch.nan, torch.inf, torch.nan
    out = depthwise.forward(x, weight, None, settings)
    assert out.isfinite().all()
    assert depthwise.weight_gradient(out, x, weight, settings).isfinite().all()
    gradient = depthwise.input_gradient(out, x, weight, settings)
    assert not gradient[:, :, 1::2].any()  # what nothing reads has none


@with_kernels
@pytest.mark.parametrize("dims", [(2, 4), (3, 4)])
def test_heads_read_permuted_gradients_and_inputs(dims: tuple[int, int]) -> None:
    x, weight, gradient = (draw(shape, HALF) for shape in ((2, 32, 6, 5, 7), (3, 32, 1, 1, 1), (2, 3, 6, 5, 7)))
    expected: list[Any] = [one_voxel.forward(x, weight, None)]
    expected += one_voxel.backward(gradient, x, weight, needs_input=True)
    given = [tensor.transpose(*dims).contiguous().transpose(*dims) for tensor in (gradient, x)]
    found = [one_voxel.forward(given[1], weight, None), *one_voxel.backward(*given, weight, needs_input=True)]
    assert found[0].equal(expected[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bias_alone_has_torchs_gradient(channels_last: bool, settings: Callable[..., Settings]) -> None:
    x, weight, gradient = torch.randn(2, 3, 5, 4, 6), torch.randn(7, 3, 3, 3, 3), torch.randn(2, 7, 5, 4, 6)

    def differentiate(*needed: bool) -> Any:
        return choice.differentiate(gradient, x, weight, [7], settings((1, 1, 1)), channels_last, needed)

    alone: list[Tensor | None] = differentiate(False, False, True)
    assert alone[:2] == [None, None]
    torch.testing.assert_close(alone[2], differentiate(True, True, True)[2])
