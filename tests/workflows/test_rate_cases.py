"""Benchmark cases: each can be built and called, and counts its operations."""

import pytest
import rate_passes as passes
import torch
from rate_convolutions import SAME, STRIDED, TRANSPOSED, TimedConvolution
from rate_passes import LAYOUTS, Layout

CPU = torch.device("cpu")

WITHOUT_HALF_ON_A_CPU = {name for name in passes.PASSES if "pool" in name or "upsample" in name}


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_every_pass_over_a_volume_can_be_called(layout: Layout) -> None:
    for name in passes.PASSES:
        if layout[0] is torch.bfloat16 and name in WITHOUT_HALF_ON_A_CPU:
            continue
        ((run, call),) = passes.prepare_passes((name,), 4, 8, layout, False, CPU)
        call()
        assert run.name == name
        assert run.bytes_moved >= 4 * 8**3 * layout[0].itemsize, name


def test_an_addition_moves_three_volumes() -> None:
    ((run, _),) = passes.prepare_passes(("aten.add",), 4, 8, (torch.float32, False), False, CPU)
    assert run.bytes_moved == 3 * 4 * 8**3 * 4


@pytest.mark.parametrize(
    ("table", "stride", "transposed"), [(SAME, 1, False), (STRIDED, 2, False), (TRANSPOSED, 2, True)]
)
def test_a_convolution_counts_its_multiplications(table: dict, stride: int, transposed: bool) -> None:
    for kernel, rows in table.items():
        came, go, _ = rows[0]
        case = TimedConvolution((came, go), kernel, 4, stride, transposed, (torch.float32, False), ours=False)
        forward, of_input, of_weight = case.prepare(CPU)
        # Each coarse voxel, or output voxel, meets every tap of every pair of channels once.
        assert {run.flops for run, _ in (forward, of_input, of_weight)} == {2 * 4**3 * kernel**3 * came * go}
        (slab, weight, _), (gradient, *_) = forward[0].shapes, of_input[0].shapes
        assert forward[1]().shape == gradient
        assert of_input[1]()[0].shape == slab == of_input[0].shapes[-1]
        assert of_weight[1]()[1].shape == weight == of_weight[0].shapes[-1]


def test_products_windows_and_optimizers_can_be_called() -> None:
    prepared = [
        *passes.prepare_product((5, 6, 7), torch.float32, CPU),
        *passes.prepare_tokens(343, 48, torch.float32, CPU),
        *passes.prepare_optimizers(1, CPU),
    ]
    for _, call in prepared:
        call()
    assert prepared[0][0].flops == 2 * 5 * 6 * 7
