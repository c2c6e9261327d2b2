"""What torch has as a view is a copy where planes lie on other shards: written to, it lost the change without a word.

Now such a write, and a read after the volume changed, raise; assignment to the volume itself does what torch does.
Everything is compared with the plain operator in float64, on real copies: "cpu:1" is copied to as a second GPU is.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import ShardedVolume, from_whole
from volseg.parallel.verification.comparison import whole

DEVICES = [["cpu", "cpu:1"], ["cpu", "cpu:1", "cpu:2", "cpu:3"]]
SHAPE = (2, 3, 9, 4, 5)


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sharded(x: Tensor, devices: list[str]) -> ShardedVolume:
    return from_whole(x, (2,), Context(LocalDevices(devices)))


OTHER = image(seed=1)

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "one plane": lambda y: y[:, :, 0].zero_(),
    "some planes": lambda y: y[:, :, 2:8].mul_(0),
    "some planes, by an operator": lambda y: y[:, :, 1:9].__iadd__(1),
    "narrowed": lambda y: y.narrow(2, 1, 4).fill_(1.0),
    "selected": lambda y: y.select(2, -1).add_(1.0),
    "a part": lambda y: y.split(3, 2)[1].zero_(),
    "unbound": lambda y: y.unbind(2)[3].zero_(),
    "a view of a copy": lambda y: y[:, :, 2:8].transpose(1, 2)[0].zero_(),
    "an activation in place": lambda y: F.relu(y[:, :, 2:8], inplace=True),
    "assigned": lambda y: y[:, :, 2:8].__setitem__((slice(None), 0), 0.0),
    "planes in groups": lambda y: y.unflatten(2, (3, 3)).zero_(),
    "flat": lambda y: y.flatten(2).zero_(),
    "gathered": lambda y: y.permute(1, 0, 2, 3, 4).reshape(-1)[7:].zero_(),
}


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("name", WRITES)
def test_a_change_through_a_copied_view_was_lost_and_is_refused(name: str, devices: list[str]) -> None:
    volume, plain = sharded(image(), devices) * 1.0, image() * 1.0
    if name == "a part" and len(devices) == 2:  # planes 3 and 4 of one slab, 5 of the other: a view as torch's
        WRITES[name](volume), WRITES[name](plain)
        assert whole(volume).equal(plain)
        return
    with pytest.raises(UnsupportedOperatorError, match=r"in place|merged"):
        WRITES[name](volume)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize(
    "view",
    [lambda y: y[:, :, 2:8], lambda y: y[:, :, 0], lambda y: y.unflatten(2, (3, 3)), lambda y: y.chunk(2, 2)[1]],
    ids=["slice", "plane", "groups", "chunk"],
)
def test_a_slice_read_after_the_volume_changed_was_stale_and_is_refused(
    view: Callable[[Tensor], Tensor], devices: list[str]
) -> None:
    volume = sharded(image(), devices) * 1.0
    taken = view(volume)
    volume.add_(1.0)
    for read in (lambda: taken * 2, lambda: whole(taken) * 2):
        with pytest.raises(UnsupportedOperatorError, match=r"changed in place after"):
            read()


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_a_view_within_slabs_is_one(devices: list[str]) -> None:
    """What lies within the slabs is a view here too: changed through it, and seen through it."""
    results = []
    for x in (image(), sharded(image(), devices)):
        y = x * 1.0
        taken = y[:, 1]
        taken.mul_(3.0)
        y.add_(1.0)
        y.transpose(1, 2)[..., 2:].zero_()
        results.append([whole(taken * 2), whole(y)])
    torch.testing.assert_close(*results)


ALL = slice(None)
ASSIGNED: dict[str, Callable[[Tensor, Tensor], None]] = {
    "a range": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), x[:, :, 1:7]),
    "a number": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), 0.5),
    "an integer": lambda y, x: y.__setitem__((ALL, ALL, 4), x[:, :, 1]),
    "a negative integer": lambda y, x: y.__setitem__((ALL, ALL, -1), x[:, :, 0] * 2),
    "a negative range": lambda y, x: y.__setitem__((ALL, ALL, slice(-7, -2)), x[:, :, :5]),
    "steps": lambda y, x: y.__setitem__((ALL, ALL, slice(1, None, 3)), x[:, :, 6:]),
    "everything": lambda y, x: y.__setitem__(..., x.flip(2)),
    "an ordinary tensor": lambda y, x: y.__setitem__((ALL, slice(1, 3), slice(0, 5)), OTHER[:, :2, :5]),
    "a broadcast plane": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), OTHER[:, :, :1]),
    "a broadcast column": lambda y, x: y.__setitem__((0, ALL, slice(3, 9)), OTHER[0, :, 3:9, :1, :1]),
    "a vector": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), OTHER[0, 0, 0, 0]),
    "a number tensor": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), OTHER.sum()),
    "nothing": lambda y, x: y.__setitem__((ALL, ALL, slice(4, 4)), 1.0),
    "in place on itself": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), y[:, :, 2:8] * 0 + 1),
    "by an operator": lambda y, x: _doubled(y),
}


def _doubled(y: Tensor) -> None:
    y[:, :, 2:8] = y[:, :, 2:8] * 2
    y[:, 1] += 1


@pytest.mark.parametrize("devices", DEVICES, ids=len)
@pytest.mark.parametrize("name", ASSIGNED)
def test_assignment_along_the_cut_is_torchs(name: str, devices: list[str]) -> None:
    results = []
    for place in (lambda x: x, lambda x: sharded(x, devices)):
        leaf = image().requires_grad_()
        x = place(leaf)
        y = x * 1.0
        ASSIGNED[name](y, x)
        result = whole(y * x)
        (gradient,) = torch.autograd.grad((result * OTHER).sum(), leaf)
        results.append((result, gradient))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("devices", DEVICES, ids=len)
def test_what_torch_copies_too_may_be_changed(devices: list[str]) -> None:
    """Lists and masks copy in torch: their results are free."""
    results = []
    for x in (image(), sharded(image(), devices)):
        picked, planes = x[:, [0, 2]].mul_(2.0), x[:, :, [1, 1, 4]].add_(1.0)
        results.append([whole(value) for value in (picked, planes, x[x > 0].mul_(3.0), x)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_another_layout_may_be_the_volume_itself_and_is_not_written_to(layout: torch.memory_format) -> None:
    """Slabs with channels last were returned themselves, where torch had copied the volume: the change was theirs."""
    for given in (image(), image().contiguous(memory_format=torch.channels_last_3d)):
        volume = sharded(given, DEVICES[0])
        laid = volume.to(memory_format=layout)
        torch.testing.assert_close(whole(laid * 2), given * 2)
        with pytest.raises(UnsupportedOperatorError, match="in place"):
            laid.mul_(2)
