"""A V-Net's plan follows the spacing: MONAI's network where voxels are nearly cubes, a flatter one elsewhere."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from volseg.models.topology import VNET_MONAI, is_thin, plan_vnet_topology
from volseg.planning import CaseSizes, Fingerprint, plan

SIDES = [32, 48, 64, 96, 128, 160, 256]
TURNS = {"D": (2, 0, 1), "H": (0, 2, 1), "W": (0, 1, 2)}
"""By the axis of the slices: the order that puts (in plane, in plane, across) along D, H, W."""


def make_fingerprint(shape=(35, 50, 36), spacing=(1.0, 1.0, 1.0), **facts):
    """Return the fingerprint of a data set of twenty cases that are all alike."""
    cases = tuple(CaseSizes(case=f"case {i}", shape=shape, spacing=spacing) for i in range(20))
    return Fingerprint(task="T", channels=("MRI",), cases=cases, **{"labels": {0: "background", 1: "organ"}, **facts})


def turn(values, axes):
    return tuple(values[axis] for axis in axes)


@pytest.mark.parametrize(
    ("shape", "spacing", "memory", "patch", "batch"),
    [
        ((35, 50, 36), (1, 1, 1), 8, (48, 64, 48), 2),  # Task04's cases, few of them
        ((320, 320, 88), (1.25, 1.25, 1.37), 8, (160, 160, 32), 3),  # left atria
        ((512, 512, 300), (0.8, 0.8, 1.5), 8, (128, 128, 64), 2),
        ((138, 169, 138), (1, 1, 1), 24, (128, 176, 128), 2),
        ((5, 5, 5), (1, 1, 1), 8, (16, 16, 16), 2),
    ],
)
def test_voxels_that_are_nearly_cubes_keep_monais_network(shape, spacing, memory, patch, batch):
    planned = plan(make_fingerprint(shape, spacing), "vnet", memory)
    assert planned.geometry.topology == VNET_MONAI
    assert (planned.geometry.patch, planned.geometry.batch) == (patch, batch)
    assert planned.values()["network"] == {
        "name": "VNet", "dropout_prob_down": 0.2, "dropout_prob_up": [0.2, 0.2], "dropout_prob_fine": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("axes", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize(
    ("shape", "spacing", "patch", "across"),
    [
        ((216, 256, 9), (1.5, 1.5, 10.0), (224, 256, 10), ((1, 1, 2, 1), (1, 1, 5, 5, 5))),  # cardiac MR
        ((320, 320, 20), (0.62, 0.62, 3.6), None, ((1, 1, 2, 1), (1, 1, 5, 5, 5))),  # prostate
        ((35, 50, 7), (1.0, 1.0, 5.0), (48, 64, 7), ((1, 1, 1, 1), (1, 1, 5, 5, 5))),
        ((216, 256, 9), (1.0, 1.0, 1.0), (224, 256, 10), ((2, 1, 1, 1), (5, 5, 5, 5, 5))),  # few slices, not thick
        ((100, 120, 2), (1.0, 1.0, 2.5), (112, 128, 2), ((1, 1, 1, 1), (1, 5, 5, 5, 5))),
        ((100, 120, 1), (1.0, 1.0, 1.0), (112, 128, 1), ((1, 1, 1, 1), (1, 1, 1, 1, 1))),
    ],
)
def test_thick_slices_are_halved_and_convolved_in_coarse_levels(shape, spacing, patch, across, axes):
    geometry = plan(make_fingerprint(turn(shape, axes), turn(spacing, axes)), "vnet").geometry
    if patch is not None:
        assert geometry.patch == turn(patch, axes)
    coarse = axes.index(2)
    assert tuple(stride[coarse] for stride in geometry.topology.strides[1:]) == across[0]
    assert tuple(kernel[coarse] for kernel in geometry.topology.kernels) == across[1]
    for axis in {0, 1, 2} - {coarse}:
        assert all(stride[axis] == 2 for stride in geometry.topology.strides[1:])
        assert all(kernel[axis] == 5 for kernel in geometry.topology.kernels)


@pytest.mark.parametrize("slices", range(1, 24))
def test_any_number_of_slices_is_padded_by_three_at_most(slices):
    """MONAI's V-Net made 16 of 9 slices, and 32 of 17."""
    fingerprint = make_fingerprint((216, 256, slices), (1.5, 1.5, 10.0))
    geometry = plan(fingerprint, "vnet", 80).geometry
    assert slices <= geometry.patch[2] < slices + 4
    assert geometry.patch[2] // geometry.topology.divisors[2] >= min(slices, 4)


@given(
    some.tuples(*[some.integers(1, 512)] * 3),
    some.tuples(*[some.floats(0.3, 12)] * 3),
    some.sampled_from([2.0, 8.0, 24.0, 80.0]),
)
@settings(max_examples=150, deadline=None)
def test_every_data_set_gets_a_network_that_takes_its_patch(shape, spacing, memory):
    geometry = plan(make_fingerprint(shape, spacing), "vnet", memory).geometry
    topology = geometry.topology
    assert all(side % divisor == 0 for side, divisor in zip(geometry.patch, topology.divisors, strict=True))
    assert geometry.features <= geometry.reference
    assert all(math.prod(kernel) % 2 for kernel in topology.kernels)
    near = max(geometry.spacing) / min(geometry.spacing) < 2
    if near and not any(is_thin(geometry.median_shape)):
        assert topology == VNET_MONAI
        assert all(side % 16 == 0 for side in geometry.patch)


@given(some.tuples(*[some.sampled_from(SIDES)] * 3), some.tuples(*[some.floats(1, 1.99)] * 3))
def test_sides_of_32_and_more_are_monais(shape, spacing):
    assert plan_vnet_topology(shape, spacing) == VNET_MONAI


def test_the_dice_loss_leaves_out_the_background():
    classes = plan(make_fingerprint()).values()["losses"]
    assert classes == [{"name": "DiceCELoss", "include_background": False}]
    regions = plan(make_fingerprint(regions={"whole": (1, 2), "core": (2,)}, labels={0: "b", 1: "a", 2: "c"}))
    assert regions.values()["losses"] == [{"name": "DiceCELoss"}]
