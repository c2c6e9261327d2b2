"""Memory of slabs: joined pieces, room for halos, kept halos, selected planes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.parallel.spatial.operators.planes import take
from volseg.parallel.spatial.transport.halo import copy_halo, put_halo_back
from volseg.parallel.spatial.transport.pieces import (
    allocate_with_room,
    extend,
    get_halo_room,
    join_pieces,
    own_planes,
    start_total,
)

each_layout = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])


@each_layout
def test_pieces_are_joined_in_the_layout_of_the_slab(layout: torch.memory_format) -> None:
    whole = torch.randn(2, 3, 5, 4, 6)
    slab = whole.contiguous(memory_format=layout)
    for dim, sizes in ((2, [1, 2, 2]), (3, [1, 2, 1])):
        first, *own = slab.split(sizes, dim)
        joined = join_pieces([first.contiguous(), *own], dim, slab)
        assert torch.equal(joined, whole)
        assert joined.is_contiguous(memory_format=layout)
    total = start_total(slab, 2, 6, 1, slab.narrow(2, 1, 4))
    assert torch.equal(total, F.pad(whole[:, :, 1:], (0, 0, 0, 0, 1, 1)))
    assert total.is_contiguous(memory_format=layout)
    assert torch.equal(start_total(slab, 2, 2, 0, None), torch.zeros(2, 3, 2, 4, 6))


@each_layout
def test_a_slab_with_room_is_extended_in_its_own_memory(layout: torch.memory_format) -> None:
    values = torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=layout)
    slab = make_roomy(values)
    for own in [(2, 2), (1, 0), (0, 0)]:
        buffer = extend(slab, get_halo_room(slab), own)
        assert buffer.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
        assert own_planes(buffer, own).data_ptr() == slab.data_ptr()
        assert torch.equal(own_planes(buffer, own), values)
        assert buffer.shape[2] == 4 + sum(own)
    wide = extend(slab, get_halo_room(slab), (3, 0))
    assert wide.untyped_storage().data_ptr() != slab.untyped_storage().data_ptr()
    assert torch.equal(own_planes(wide, (3, 0)), values)
    assert torch.equal(slab, values)


def make_roomy(values: Tensor) -> Tensor:
    return allocate_with_room(values, 2).copy_(values)


def test_views_and_copies_of_a_slab_with_room_have_none() -> None:
    slab = make_roomy(torch.randn(1, 3, 4, 5, 6))
    for other in (slab[:, :2], slab.narrow(2, 1, 2), slab.detach(), slab.clone(), slab.double(), slab + 1):
        assert get_halo_room(other) == 0
    assert get_halo_room(slab.add_(1)) == 2


class Roomy(torch.autograd.Function):
    """Gives room to its result and to its gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, found: list[int]) -> Tensor:
        ctx.found = found
        return make_roomy(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.found.append(get_halo_room(gradient))
        return make_roomy(gradient), None


def test_autograd_passes_a_slab_on_with_its_room() -> None:
    """From a norm's backward pass to that of the convolution in front of it."""
    found: list[int] = []
    first = Roomy.apply(torch.randn(1, 3, 4, 5, 6, requires_grad=True), found)
    assert get_halo_room(first) == 2
    Roomy.apply(first, found).sum().backward()
    assert found == [0, 2]


@pytest.mark.parametrize("own", [(0, 0), (1, 1), (2, 2), (1, 0), (0, 2), (2, 1)])
@each_layout
def test_a_kept_halo_comes_back(own: tuple[int, int], layout: torch.memory_format) -> None:
    buffer = torch.randn(2, 3, 6, 4, 5).contiguous(memory_format=layout)
    before, behind = own
    kept = copy_halo(buffer, own)
    assert len(kept) == len({planes for planes in own if planes})
    changed = buffer.clone()
    changed[:, :, :before] = changed[:, :, 6 - behind :] = 0
    put_halo_back(changed, own, kept)
    assert torch.equal(changed, buffer)
    part = changed[:, 1:].contiguous(memory_format=layout).zero_()  # some of the channels
    put_halo_back(part, own, [edge.narrow(1, 1, 2) for edge in kept])
    assert torch.equal(part[:, :, :before], buffer[:, 1:, :before])
    assert torch.equal(part[:, :, 6 - behind :], buffer[:, 1:, 6 - behind :])


def test_planes_that_are_taken_apart_may_change_in_place_and_others_may_not() -> None:
    slab = torch.randn(1, 2, 6, 2, 2).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    part = take(slab * 1.0, 2, 1, 3, apart=True)
    assert get_halo_room(part) == 0
    part.mul_(3.0)
    part.sum().backward()
    assert torch.equal(slab.grad, F.pad(torch.full((1, 2, 3, 2, 2), 3.0), (0, 0, 0, 0, 1, 2)))
    assert slab.grad.stride(1) == 1
    source = slab * 1.0
    result = take(source, 2, 1, 3).square()
    source.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified inplace"):
        result.sum().backward()
