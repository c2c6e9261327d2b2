"""Residual networks on slabs of processes: sums with room for a halo, planes in a slab's own layout."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import assert_no_coarser, measure_rounding, on_slabs
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.spatial.convolution import around
from volseg.parallel.spatial.convolution import slab as slab_convolution
from volseg.parallel.spatial.operators import planes
from volseg.parallel.spatial.transport.pieces import get_halo_room, join_pieces, start_total

LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_are_joined_in_a_slabs_layout(layout: torch.memory_format, dim: int) -> None:
    whole = torch.randn(2, 3, 5, 4, 6)
    slab = whole.contiguous(memory_format=layout)
    first, *own = slab.split([1, 2, 2] if dim == 2 else [1, 2, 1], dim)
    joined = join_pieces([first.contiguous(), *own], dim, slab)
    assert torch.equal(joined, whole)
    assert joined.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_total_begins_with_ones_own_planes_among_zeros(layout: torch.memory_format) -> None:
    planes = torch.randn(1, 3, 4, 2, 2).contiguous(memory_format=layout)
    total = start_total(planes, 2, 6, 1, planes.narrow(2, 1, 3))
    assert torch.equal(total, F.pad(planes[:, :, 1:], (0, 0, 0, 0, 1, 2)))
    assert total.is_contiguous(memory_format=layout)
    assert torch.equal(start_total(planes, 2, 2, 0, None), torch.zeros(1, 3, 2, 2, 2))


def pad_in_processes(widths: tuple[int, ...], value: float) -> Tensor:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x * 2.0, widths, value=value)

    return ModelParallel(Padded(), strategy="spatial")(make_volume()).full_tensor()


def make_volume() -> Tensor:
    return torch.arange(2 * 3 * 9 * 4 * 5.0).reshape(2, 3, 9, 4, 5)


@pytest.mark.parametrize(
    "widths", [(1, 2, 0, 1, 3, 0), (-1, 1, 2, -1, 2, 0), (0, 0, 0, -2, -1, 2), (1, 0, 0, 0, -3, -2, 1, 0), (1, 1, 1, 1)]
)
def test_volumes_are_padded_and_cropped_at_once(widths: tuple[int, ...]) -> None:
    for padded in in_group(2, pad_in_processes, widths, 0.5):
        assert torch.equal(padded, F.pad(make_volume() * 2.0, widths, value=0.5))


class Blocks(nn.Module):
    """A sum as it is, one behind a norm, and a wide halo behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv3d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.InstanceNorm3d(3)
        self.wide = nn.Conv3d(3, 3, 3, padding=4, dilation=4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x = x + self.first(x)
        x = F.relu(self.norm(self.second(x)) + x)
        return self.wide(F.relu(self.norm(self.third(x))))


def list_copies() -> list[bool]:
    """Return, for each slab that a convolution extends in a step, whether it was copied."""
    extend, copied = slab_convolution.extend, []
    places = (slab_convolution, around)  # inputs, and gradients

    def note(slab: Tensor, room: int, own: tuple[int, int]) -> Tensor:
        buffer = extend(slab, room, own)
        copied.append(buffer.untyped_storage().data_ptr() != slab.untyped_storage().data_ptr())
        return buffer

    torch.manual_seed(0)
    model = ModelParallel(Blocks(), strategy="spatial", channels_last=True)
    for place in places:
        place.extend = note
    try:
        model(torch.randn(1, 3, 24, 4, 4)).square().mean().backward()
    finally:
        for place in places:
            place.extend = extend
    return copied


def test_convolutions_behind_sums_copy_no_slab() -> None:
    """All but the first, whose input is a product; and backward those of gradients that norms write."""
    for copied in in_group(2, list_copies):
        forward, backward = copied[:4], copied[4:]
        assert forward == [True, False, False, False]
        assert backward == [False, False]  # of the third and the second: the first one's input needs none


OPERATORS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.pad(x, (1, 0, 1, 0, 1, 0)),
    lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)),
    lambda x: x[:, :, 2:8],
    lambda x: x.flip(2),
]


class Moved(nn.Module):
    """Planes that move between shards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(4, 4, 3, padding=1)
        self.results: list[bool] = []
        self.gradients: list[bool] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found, features = [], self.stem(x)
        for operator in OPERATORS:
            given = features * 2.0
            given.slabs[0].register_hook(lambda gradient: self.gradients.append(is_last(gradient)))  # type: ignore[attr-defined]
            result = operator(given)
            self.results.append(is_last(result.slabs[0]))  # type: ignore[attr-defined]
            found.append((result * result).sum())
        return tuple(found)


def list_layouts() -> tuple[list[bool], list[bool]]:
    """Return whether results, and gradients, of operators that fetch planes have their channels last."""
    torch.manual_seed(0)
    net = Moved()
    outputs = ModelParallel(net, strategy="spatial", channels_last=True)(torch.randn(1, 4, 9, 6, 4))
    torch.stack(outputs).sum().backward()
    return net.results, net.gradients


def is_last(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1


def test_planes_that_are_fetched_keep_the_layout_forward_and_backward() -> None:
    for results, gradients in in_group(2, list_layouts):
        assert results == gradients == [True] * len(OPERATORS)


def compare_in_half_precision() -> list[dict[str, float]]:
    """Return the errors of slabs and of the plain network, both in bfloat16."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "equivalence"))
    from spatial_cases import Residual

    torch.manual_seed(0)
    way = on_slabs(None, channels_last=True)
    return measure_rounding(Residual(), torch.randn(1, 1, 24, 8, 6), way, None)


def test_half_precision_is_as_exact_as_one_devices() -> None:
    for ours, plain in in_group(2, compare_in_half_precision):
        assert_no_coarser(ours, plain, more=0.02)


def change_what_a_convolution_read() -> str:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            total = x * 2.0 + x
            result = self.conv(total)
            total.mul_(2.0)
            return result + total

    net = ModelParallel(Changed(), strategy="spatial")
    try:
        net(torch.randn(1, 2, 8, 4, 4, requires_grad=True)).sum().backward()
    except RuntimeError as fault:
        return str(fault)
    return "none"


def test_a_sum_with_room_that_changes_behind_its_convolution_is_refused() -> None:
    for found in in_group(2, change_what_a_convolution_read):
        assert "modified by an inplace operation" in found


def take_a_part(apart: bool) -> Any:
    slab = torch.randn(1, 2, 6, 2, 2).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    source = slab * 1.0
    part = planes.take(source, 2, 1, 3, apart=apart)
    return slab, source, part


def test_a_part_that_stands_apart_may_change_in_place() -> None:
    slab, _, part = take_a_part(apart=True)
    assert get_halo_room(part) == 0
    part.mul_(3.0)
    part.sum().backward()
    assert torch.equal(slab.grad, F.pad(torch.full((1, 2, 3, 2, 2), 3.0), (0, 0, 0, 0, 1, 2)))
    assert is_last(slab.grad)


def test_a_part_that_is_read_knows_of_changes() -> None:
    _, source, part = take_a_part(apart=False)
    result = part.square()
    source.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified inplace"):
        result.sum().backward()
