"""N shards equal one device: outputs, every gradient, buffers and steps, in one process and across processes."""

from dataclasses import replace
from typing import Any

import pytest
import spatial_cases as spatial
import torch
from beside_plain import assert_small, compare, name_cpus
from in_group import in_group

from volseg.parallel import ModelParallel

NAMES = sorted(spatial.CASES)


def every_fourth(names: list[str], numbers: tuple[int, ...]) -> list[Any]:
    """Return each name with each number; three of four pairs are slow, so that each name meets one of the others."""
    return [
        pytest.param(name, number, marks=pytest.mark.slow if (row + column) % 4 else ())
        for row, name in enumerate(names)
        for column, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(("name", "shards"), every_fourth(NAMES, (2, 3, 4, 8)))
def test_shards_of_one_process_equal_one_device(name: str, shards: int) -> None:
    assert_small(spatial.run(spatial.CASES[name], devices=name_cpus(shards)))


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", ["accumulated", "in half precision", "supervised"])
def test_training_habits(name: str, shards: int) -> None:
    assert_small(spatial.EXTRA[name](devices=["cpu"] * shards))


def test_vnet_of_one_process_equals_one_device() -> None:
    assert_small(spatial.run(spatial.VNET, devices=["cpu"] * 4))


@pytest.mark.parametrize("axes", spatial.THICK_VNETS.values(), ids=spatial.THICK_VNETS)
@pytest.mark.parametrize("cut", ["D", "W"])
def test_vnet_of_thick_slices_equals_one_device(axes: tuple[int, int, int], cut: str) -> None:
    """The axis that is cut is halved four times, or once behind kernels of one plane: of six planes four are halos."""
    case = spatial.thick_vnet(axes)
    case = replace(case, options={**case.options, "axes": cut})
    assert_small(spatial.run(case, devices=["cpu", "cpu:1"]))


@pytest.mark.parametrize(
    ("name", "grid"), [("unet group", (2, 2)), ("pad crop join", (3, 2)), ("squeeze and excite", (2, 2))]
)
def test_two_cut_axes_equal_one_device(name: str, grid: tuple[int, int]) -> None:
    shards = grid[0] * grid[1]
    assert_small(spatial.run(spatial.CASES[name], devices=["cpu"] * shards, grid=grid, axes=("D", "H")))


EXTRA = sorted(set(spatial.EXTRA) - {"replicas"})
OTHERS = [(2, EXTRA), (4, [*EXTRA, "replicas"])]
SLOW = [(2, NAMES[1::2]), (3, [*NAMES, "vnet", "slices along D"]), (4, NAMES[::2]), (8, NAMES)]


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        *((name, 2 if row % 2 == 0 else 4) for row, name in enumerate(NAMES)),
        *((name, processes) for processes, names in OTHERS for name in names),
        *(pytest.param(name, n, marks=pytest.mark.slow) for n, names in SLOW for name in names),
    ],
)
def test_processes_equal_one_device(name: str, processes: int) -> None:
    for errors in in_group(processes, spatial.run_by_name, name):
        assert_small(errors)


def test_the_check_rejects_what_is_wrong() -> None:
    """A comparison that passes everything shows nothing: halve a gradient, drop the halo."""
    net = torch.nn.Conv3d(1, 2, 3, padding=1).double()
    volume = torch.randn(1, 1, 8, 5, 5, dtype=torch.float64)

    class Halved(torch.nn.Conv3d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight / 2 + self.weight.detach() / 2
            return self._conv_forward(x, weight, self.bias)

    class Local(torch.nn.Conv3d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([super(Local, self).forward(part) for part in x.chunk(2, 2)], 2)

    for kind, broken in ((Halved, "gradient of weight"), (Local, "output 0")):
        other = kind(1, 2, 3, padding=1).double()
        other.load_state_dict(net.state_dict())
        errors = compare(net, ModelParallel(other, strategy="spatial", devices=["cpu"] * 2), [volume])
        assert errors[broken] > 1e-3
