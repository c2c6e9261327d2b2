"""Gradients of large slabs without room: what the neighbours' planes add comes apart, and equals the rest."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import verify
from volseg.parallel.spatial.convolution import around


class Net(nn.Module):
    """Residual blocks, whose sums' gradients have no room, and a transposed convolution in front of a sum.

    ``up`` is its kernel, stride, padding and output padding.
    """

    def __init__(self, kernel: int, up: tuple[int, int, int, int], groups: int = 1) -> None:
        super().__init__()
        around = kernel // 2
        self.stem = nn.Conv3d(2, 4, 3, padding=1)
        self.first = nn.Conv3d(4, 4, kernel, padding=around, groups=groups)
        self.joined = nn.Conv3d(8, 4, kernel, padding=around, groups=groups)
        self.norms = nn.ModuleList([nn.InstanceNorm3d(4, affine=True) for _ in range(2)])
        self.up = nn.ConvTranspose3d(4, 4, *up, groups=groups)
        self.last = nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.first(F.relu(self.norms[0](x))) + x
        x = self.joined(torch.cat([F.relu(self.norms[1](x)), x], 1)) + x
        up = self.up(x)
        result: Tensor = self.last(up + up.flip(3))
        return result


UPS = {
    "3 by 2": (3, 2, 1, 1),
    "4 by 2": (4, 2, 1, 0),
    "5 by 2": (5, 2, 2, 1),
    "7 by 2": (7, 2, 3, 1),
    "3": (3, 1, 1, 0),
}


def verified(
    net: Net, shape: tuple[int, ...], large: int, devices: list[str] | None, **options: bool
) -> tuple[str, int]:
    """Compare with one device; return what is wrong, and how many planes' shares came apart."""
    add = around.SurroundedGradients._add_edge
    with (
        mock.patch.object(around, "LARGE", large),
        mock.patch.object(around.SurroundedGradients, "_add_edge", autospec=True, side_effect=add) as added,
    ):
        report = verify(net, shape, devices, axes="D", **options)
    return "" if report.ok else str(report), added.call_count


CASES = [
    *((3, planes, shards, up, 1) for up in UPS for planes, shards in ((8, 2), (9, 3))),
    *((kernel, 12, 2, up, 4) for kernel, up in ((3, "3 by 2"), (3, "4 by 2"), (5, "5 by 2"), (5, "3"))),
]


@pytest.mark.parametrize(("kernel", "planes", "shards", "up", "groups"), CASES)
def test_slabs_of_one_process(kernel: int, planes: int, shards: int, up: str, groups: int) -> None:
    torch.manual_seed(0)
    devices = ["cpu", *(f"cpu:{index}" for index in range(1, shards))]
    fault, added = verified(Net(kernel, UPS[up], groups), (2, 2, planes, 4, 4), 0, devices, fixed_order=True)
    assert not fault
    assert added > 0


def in_process(up: str, large: tuple[int, int]) -> tuple[str, int]:
    """Compare in a process; ``large`` is the limit in each."""
    torch.manual_seed(0)
    return verified(Net(3, UPS[up]), (1, 2, 8, 4, 4), large[torch.distributed.get_rank()], None)


SMALL = around.LARGE


@pytest.mark.parametrize(
    ("up", "large"),
    # A small slab is copied between the planes. Processes may decide differently: a slab's room is its own matter.
    [("3 by 2", (0, 0)), ("4 by 2", (0, 0)), ("5 by 2", (0, 0)), ("3 by 2", (SMALL, SMALL)), ("3 by 2", (SMALL, 0))],
)
def test_slabs_of_processes(up: str, large: tuple[int, int]) -> None:
    for (fault, added), own in zip(in_group(2, in_process, up, large), large, strict=True):
        assert not fault
        assert (added > 0) == (own == 0)
