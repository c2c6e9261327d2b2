"""The networks that speed is compared on, exactly: by the fast kernels' functions, and in slabs.

Small ones of the same classes as ``workflows/benchmarks/networks.py`` measures: outputs, every gradient, buffers, and a
second step, in training and in evaluation.
"""

import sys
from pathlib import Path

import pytest
import torch

from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.verification.comparison import TOLERANCE, compare, compare_values, observe_call

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

from networks_listed import NETWORKS, build, fit

SIDES = (32, 16, 16)
"""Four halvings leave two voxels, which norms over instances need."""

WIDE = {"SwinUNETR": (64, 32, 32), "UNETR": (16, 16, 16)}

WAYS = {
    "fast kernels": lambda net: FastKernels(net, "cpu"),
    "slabs": lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"]),
}

SLOW = ("VNet", "SwinUNETR")
"""V-Net has 45 million parameters however it is asked for; SwinUNETR takes no volume of less than 64 x 32 x 32."""

LISTED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NETWORKS]


def make(name):
    """Return a plain network, another one of the same values, and a volume."""
    sides = WIDE.get(name, SIDES)
    plain, other = (build(name, sides, small=True).double() for _ in range(2))
    return plain, other, torch.randn(1, 1, *sides, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LISTED)
def test_two_steps_equal_those_of_the_plain_network(name, way):
    plain, other, image = make(name)
    errors = compare(plain, WAYS[way](other), [image], steps=2)
    assert {value: error for value, error in errors.items() if not error <= TOLERANCE} == {}
    assert any(value.startswith("gradient of ") for value in errors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LISTED)
def test_evaluation_equals_that_of_the_plain_network(name, way):
    plain, other, image = make(name)
    found = compare_values(observe_call(plain.eval(), [image]), observe_call(WAYS[way](other.eval()), [image]))
    assert found.wrong == {}


def test_sides_are_those_that_a_network_takes():
    assert fit("SwinUNETR", (32, 16, 128)) == (64, 32, 128)
    assert fit("DynUNet", (32, 32, 32)) == (32, 32, 32)
