"""With MONAI's kernels and strides per level, our V-Net equals MONAI's bit for bit."""

import pytest
import torch
from monai.networks import nets

from volseg.errors import ConfigError
from volseg.models.grids import GridRule, grid_rule
from volseg.models.networks import build_network
from volseg.models.topology import VNET_MONAI, plan_vnet_topology
from volseg.models.vnet import VNet
from volseg.planning.geometry import turn_topology

FLAT = plan_vnet_topology((216, 256, 9), (1.5, 1.5, 10.0))
"""The cardiac MR of docs/planning.md."""


def flat(**parameters):
    return VNet(strides=FLAT.strides, kernel_size=FLAT.kernels, **parameters)


def assert_one_step_alike(ours, theirs, shape):
    image = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    outputs = []
    for net in (ours, theirs):
        torch.manual_seed(2)  # of dropout
        outputs.append(net(image))
        (outputs[-1] * outputs[-1].sigmoid()).mean().backward()
    assert torch.equal(*outputs)
    gradients = [{name: weight.grad for name, weight in net.named_parameters()} for net in (ours, theirs)]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    for name, buffer in ours.named_buffers():
        assert torch.equal(buffer, theirs.get_buffer(name))


@pytest.mark.parametrize("given", [{}, {"strides": (1, 2, 2, 2, 2), "kernel_size": [5] * 5}])
def test_with_monais_strides_and_kernels_it_is_monais_network(given):
    """Initial weights, outputs, dropout, gradients and running statistics are equal bit for bit."""
    torch.manual_seed(0)
    theirs = nets.VNet(in_channels=2, out_channels=3)
    torch.manual_seed(0)
    ours = VNet(in_channels=2, out_channels=3, **given)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    assert_one_step_alike(ours, theirs, (1, 2, 16, 32, 16))


def test_other_strides_and_kernels_change_only_the_shapes_of_convolutions():
    with torch.device("meta"):
        theirs, ours = nets.VNet(out_channels=3).state_dict(), flat(out_channels=3).state_dict()
    assert [*ours] == [*theirs]
    for name, value in theirs.items():
        assert ours[name].shape[:2] == value.shape[:2], name
        assert value.ndim == 5 or ours[name].shape == value.shape
    kernels = {
        "in_tr.conv_block.conv": (5, 5, 1),
        "out_tr.conv_block.conv": (5, 5, 1),
        "down_tr32.ops.0.conv_block.conv": (5, 5, 1),
        "down_tr64.ops.1.conv_block.conv": (5, 5, 5),
        "up_tr256.ops.1.conv_block.conv": (5, 5, 5),
        "down_tr32.down_conv": (2, 2, 1),
        "up_tr32.up_conv": (2, 2, 1),
        "down_tr128.down_conv": (2, 2, 2),
        "up_tr256.up_conv": (2, 2, 1),
    }
    assert {name: tuple(ours[f"{name}.weight"].shape[2:]) for name in kernels} == kernels


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_turned_network_gives_turned_logits(axes):
    torch.manual_seed(0)
    net = flat(out_channels=2).eval()
    topology = turn_topology(FLAT, axes)
    turned = VNet(out_channels=2, strides=topology.strides, kernel_size=topology.kernels).eval()
    dims = [0, 1, *(2 + axis for axis in axes)]
    weights = {name: v.permute(dims) if v.ndim == 5 else v for name, v in net.state_dict().items()}
    turned.load_state_dict(weights)
    image = torch.randn(1, 1, 16, 32, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(turned(image.permute(dims)), net(image).permute(dims), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "rule", "axis", "sides"),
    [(flat, (16, 16, 2), 4, (1, 2, 3, 9, 10)), (nets.VNet, (16, 16, 16), 2, (15, 16, 24, 32, 40, 48))],
    ids=["flat", "MONAI's"],
)
def test_its_grid_rule_follows_its_strides(build, rule, axis, sides):
    """The brute force runs on shapes only: one pass costs 45 million parameters."""
    with torch.device("meta"):
        net = build().train()
    assert grid_rule(net) == GridRule(rule, rule, least_blocks=2)
    for side in sides:
        shape = [1, 1, 32, 32, 32]
        shape[axis] = side
        try:
            taken = net(torch.zeros(shape, device="meta")).shape[axis] == side
        except (RuntimeError, ValueError):
            taken = False
        assert grid_rule(net).takes(shape[2:]) == taken
    assert net.training


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_gives_the_same_logits():
    net = flat(out_channels=2).eval()
    image = torch.randn(1, 1, 32, 16, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for script in (torch.jit.script(net), torch.jit.trace(net, torch.zeros(1, 1, 16, 32, 6))):
            torch.testing.assert_close(script(image), net(image), rtol=1e-5, atol=1e-6)


def test_a_config_builds_it_from_lists():
    spec = {"name": "VNet", "strides": [1, *map(list, FLAT.strides[1:])], "kernel_size": [*map(list, FLAT.kernels)]}
    with torch.device("meta"):
        net = build_network(spec, in_channels=1, out_channels=2)
    assert (net.strides, net.kernels) == (FLAT.strides, FLAT.kernels)
    with torch.device("meta"):
        plain = build_network({"name": "VNet"}, in_channels=1, out_channels=2, patch_size=(224, 256, 16))
    assert (plain.strides, plain.kernels) == (VNET_MONAI.strides, VNET_MONAI.kernels)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"strides": (1, 2, 2, 2)}, r"VNet needs strides for its 5 levels, .* got \[1, 2, 2, 2\]"),
        ({"strides": (2, 2, 2, 2, 2)}, r"first level has the image's grid: its stride must be 1, got \(2, 2, 2\)"),
        ({"strides": (1, 2, 2, (2, 2), 2)}, r"each a positive whole number or three of them"),
        ({"strides": (1, 2, 2, 0, 2)}, r"each a positive whole number or three of them"),
        ({"kernel_size": [5] * 6}, r"VNet needs kernel_size for its 5 levels"),
        ({"kernel_size": [5, 5, 5, (5, 5, 4), 5]}, r"odd along each axis, got \(5, 5, 4\)"),
        ({"kernel_size": [True] * 5}, r"each a positive whole number or three of them"),
        ({"kernel_size": 5}, r"network VNet refused"),
    ],
)
def test_wrong_strides_and_kernels_are_refused(parameters, message):
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        build_network({"name": "VNet", **parameters}, in_channels=1, out_channels=2)


def test_an_image_is_no_volume():
    with torch.device("meta"), pytest.raises(ConfigError, match=r"only volumes .*=2; for 2D images use monai"):
        VNet(spatial_dims=2)
