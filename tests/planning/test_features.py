"""The memory of trained networks is counted by the elements of their convolutions' outputs."""

import math

import pytest
import torch
from torch import nn

from volseg.models.networks import build_network
from volseg.models.topology import plan_topology, plan_vnet_topology
from volseg.planning.patch import count_residual_features, count_unet_features, count_vnet_features, reference_features


def count_outputs(net, patch):
    """Return how many elements the convolutions of a network put out."""
    counts = []
    for module in net.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.register_forward_hook(lambda module, inputs, output: counts.append(output.numel()))
    net.to("meta").eval()(torch.zeros(1, 2, *patch, device="meta"))
    return sum(counts)


@pytest.mark.parametrize(("patch", "spacing"), [((40, 56, 40), (1, 1, 1)), ((64, 80, 20), (0.625, 0.625, 3.6))])
@pytest.mark.parametrize("preset", ["unet", "resenc"])
def test_features_are_the_networks(preset, patch, spacing):
    topology = plan_topology(patch, spacing)
    spec = {"name": "DynUNet" if preset == "unet" else "ResEncUNet"}
    spec |= {"strides": topology.strides, "kernel_size": topology.kernels, "filters": topology.filters}
    net = build_network(spec, in_channels=2, out_channels=3, patch_size=patch)
    count = count_unet_features if preset == "unet" else count_residual_features
    counted = count(patch, topology, 3)
    if preset == "resenc":  # nnU-Net counts a skip that is pooled and keeps its channels as if it were convolved
        sides = [math.prod(patch)]
        for stride in topology.strides[1:]:
            sides.append(sides[-1] // math.prod(stride))
        same = [i for i in range(1, len(sides)) if topology.filters[i] == topology.filters[i - 1]]
        counted -= sum(topology.filters[i] * sides[i] for i in same)
    assert count_outputs(net, patch) == counted


@pytest.mark.parametrize("num_outputs", [2, 5])
def test_features_of_a_vnet_are_the_networks(num_outputs):
    for patch, spacing in (((64, 32, 48), (1, 1, 1)), ((64, 32, 10), (1.5, 1.5, 10)), ((5, 48, 64), (5, 1, 1))):
        topology = plan_vnet_topology(patch, spacing)
        spec = {"name": "VNet", "strides": topology.strides, "kernel_size": topology.kernels}
        net = build_network(spec, in_channels=2, out_channels=num_outputs)
        assert count_outputs(net, patch) == count_vnet_features(patch, topology, num_outputs)


@pytest.mark.parametrize(
    ("preset", "memory", "million"),
    [
        ("unet", 8, 560),
        ("unet", 2, 140),
        ("whole", 16, 1120),
        ("resenc", 8, 680),
        ("resenc", 23, 1955),
        ("resenc", 24, 2100),
        ("resenc", 40, 3600),
        ("resenc", 80, 7200),
    ],
)
def test_reference_grows_with_the_memory(preset, memory, million):
    assert reference_features(preset, memory) == pytest.approx(million * 1e6)
