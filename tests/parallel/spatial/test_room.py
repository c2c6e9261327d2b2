"""Room around a slab: who has it, and what lies there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from volseg.parallel.spatial.transport.pieces import allocate_with_room, extend, get_halo_room, own_planes


def roomy(values: Tensor, room: int = 2) -> Tensor:
    return allocate_with_room(values, room).copy_(values)


@pytest.mark.parametrize("last", [False, True])
def test_a_slab_with_room_is_extended_in_its_own_memory(last: bool) -> None:
    layout = torch.channels_last_3d if last else torch.contiguous_format
    values = torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=layout)
    slab = roomy(values)
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


def test_what_is_made_of_a_slab_with_room_has_none() -> None:
    """A view may begin elsewhere, and a copy lies in memory of its own."""
    slab = roomy(torch.randn(1, 3, 4, 5, 6))
    assert get_halo_room(slab) == 2
    for other in (
        slab[:, :2],
        slab.narrow(2, 1, 2),
        slab.detach(),
        slab.clone(),
        slab.double(),
        slab + 1,
    ):
        assert get_halo_room(other) == 0
    assert get_halo_room(slab.add_(1)) == 2


class Roomy(torch.autograd.Function):
    """Gives its result, and its gradient, room."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, found: list[int]) -> Tensor:
        ctx.found = found
        return roomy(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.found.append(get_halo_room(gradient))
        return roomy(gradient), None


def test_autograd_hands_on_a_slab_with_its_room() -> None:
    """From a norm's backward pass to that of the convolution in front of it."""
    found: list[int] = []
    first = Roomy.apply(torch.randn(1, 3, 4, 5, 6, requires_grad=True), found)
    assert get_halo_room(first) == 2
    Roomy.apply(first, found).sum().backward()
    assert found == [0, 2]
