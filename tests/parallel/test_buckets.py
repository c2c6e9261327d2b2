"""Gradients in one bucket: gathered, or written to their places as they are computed."""

import pytest
import torch
from torch import Tensor

from volseg.parallel import buckets
from volseg.parallel.buckets import GradientRoom


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "LARGE", 12)


def parameters() -> list[Tensor]:
    return [
        torch.zeros(3),
        torch.zeros(2, 3, 2),
        torch.zeros(1),
        torch.zeros(2, 3, 1, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.zeros(5),
    ]


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(parameter.shape, generator=generator).bfloat16().float() for parameter in parameters()]


def check(room: GradientRoom, flat: Tensor, expected: list[Tensor], further: Tensor) -> None:
    found = room.split(flat)
    for parameter, one, wanted in zip(parameters(), found, expected, strict=True):
        assert torch.equal(one, wanted)
        assert one.stride() == buckets.read_layout(parameter)
    assert torch.equal(flat[-len(further) :], further)
    assert flat.numel() == sum(parameter.numel() for parameter in parameters()) + len(further)


@pytest.mark.parametrize("put", [(), (1,), (3,), (1, 3)])
@pytest.mark.parametrize("missing", [(), (0,), (1,), (3, 4), (0, 1, 2, 3, 4)])
def test_gradients_lie_where_they_belong(put: tuple[int, ...], missing: tuple[int, ...]) -> None:
    given, further = gradients(), torch.arange(5.0)
    room = GradientRoom(parameters(), 5)
    handed: list[Tensor | None] = [None if number in missing else one for number, one in enumerate(given)]
    placed = {number: room.put(number, given[number].bfloat16()) for number in put if number not in missing}
    for number, gradient in placed.items():
        handed[number] = gradient
        assert gradient.dtype == torch.float32
    flat = room.gather(handed, further)
    storages = {gradient.untyped_storage().data_ptr() for gradient in placed.values()}
    assert storages <= {flat.untyped_storage().data_ptr()}  # gathered where it lies
    kept = flat.clone()
    room.gather([None, room.put(1, 2 * given[1]), *[None] * 3], further)  # a second pass has memory of its own
    assert torch.equal(flat, kept)
    expected = [torch.zeros_like(one) if number in missing else one for number, one in enumerate(given)]
    check(room, flat, expected, further)


def test_a_second_use_does_not_overwrite_the_first() -> None:
    room, given = GradientRoom(parameters(), 5), gradients()
    first = room.put(1, given[1].bfloat16())
    second = room.put(1, (3 * given[1]).bfloat16())
    assert torch.equal(first, given[1])
    handed = [given[0], first + second, *given[2:]]
    check(room, room.gather(handed, torch.zeros(5)), handed, torch.zeros(5))


def test_a_backward_pass_within_another_one_leaves_what_waits() -> None:
    """Its gradients were written over those that waited for the outer one's sum."""
    room, given = GradientRoom(parameters()), gradients()
    found: list[Tensor] = []

    def run_inner(gradient: Tensor) -> None:
        del gradient
        found.append(room.gather([None, room.put(1, 3 * given[1]), *given[2:]]))

    def run(gradient: Tensor) -> None:
        del gradient
        first = room.put(1, given[1])
        with torch.enable_grad():
            inner = torch.zeros(1, requires_grad=True) * 2
        inner.register_hook(run_inner)
        inner.backward()
        last = room.put(3, given[3])
        found.append(room.gather([given[0], first, given[2], last, given[4]]))

    outer = torch.zeros(1, requires_grad=True) * 2
    outer.register_hook(run)
    outer.backward()
    inside, outside = (room.split(flat) for flat in found)
    assert torch.equal(inside[1], 3 * given[1])
    assert all(torch.equal(one, wanted) for one, wanted in zip(outside, given, strict=True))


def test_only_small_or_only_large_ones() -> None:
    small, large = [torch.zeros(2), torch.zeros(3)], [torch.zeros(12), torch.zeros(4, 4)]
    assert GradientRoom(small).gather([torch.ones(2), None]).tolist() == [1, 1, 0, 0, 0]
    room = GradientRoom(large)
    flat = room.gather([room.put(0, torch.ones(12)), None])
    assert flat.tolist() == [1.0] * 12 + [0.0] * 16
