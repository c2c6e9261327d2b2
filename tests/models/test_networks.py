"""Networks by name: defaults, refusals, and output shapes."""

import pytest
import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.networks import nets

from volseg.errors import ConfigError
from volseg.models.networks import NETWORKS, DynUNet, build_network
from volseg.models.topology import plan_topology
from volseg.models.vnet import VNet


def build(name, patch_size=(40, 56, 40), **parameters):
    return build_network({"name": name, **parameters}, in_channels=2, out_channels=3, patch_size=patch_size)


def test_dynunet_is_planned_as_nnunet_plans_task04():
    net = build("DynUNet")
    assert list(net.strides) == [(1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2)]
    assert list(net.filters) == [32, 64, 128, 256]
    parameters = sum(p.numel() for p in net.parameters())
    assert abs(parameters / 5.60e6 - 1) < 0.01  # as MONAI's with these strides has


def test_state_of_our_dynunet_is_monais():
    ours = build("DynUNet", deep_supervision=True)
    topology = plan_topology((40, 56, 40))
    theirs = nets.DynUNet(
        3, 2, 3, topology.kernels, topology.strides, topology.strides[1:], topology.filters, deep_supervision=True
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    expected, outputs = theirs(x).unbind(1), ours(x)
    assert [tuple(head.shape[2:]) for head in outputs] == [(16, 16, 16), (8, 8, 8)]
    torch.testing.assert_close(outputs[0], expected[0])
    resized = torch.nn.functional.interpolate(outputs[1], size=(16, 16, 16))
    torch.testing.assert_close(resized, expected[1])
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_deep_supervision_feeds_its_loss_and_leaves_no_graph_behind():
    net = build("DynUNet", deep_supervision=True, filters=[4, 8, 8, 8])
    outputs = net(torch.randn(2, 2, 16, 16, 16))
    assert all(head is None for head in net.heads)
    label = torch.randint(0, 3, (2, 1, 16, 16, 16)).float()
    DeepSupervisionLoss(DiceCELoss(softmax=True, to_onehot_y=True))(outputs, label).backward()
    assert all(p.grad is not None for p in net.deep_supervision_heads.parameters())
    assert net(torch.randn(2, 2, 16, 16, 16))[1].shape == (2, 3, 8, 8, 8)  # a second step works
    assert isinstance(net, DynUNet)


def dropouts(net):
    return [module.p for module in net.modules() if isinstance(module, torch.nn.Dropout3d)]


def test_vnet_is_monais_with_all_its_dropouts_in_reach():
    with torch.device("meta"):
        theirs, ours = nets.VNet(), build("VNet")
        none = build("VNet", dropout_prob_down=0.0, dropout_prob_up=[0.0, 0.0], dropout_prob_fine=0.0)
        left = nets.VNet(dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0))
    assert isinstance(ours, VNet)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert dropouts(ours) == dropouts(theirs)
    assert len(dropouts(none)) == 8
    assert not any(dropouts(none))
    assert any(dropouts(left))  # MONAI's own parameters do not reach them all: what this class is for


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "Vnet2"}, "no network is called 'Vnet2'; did you mean 'VNet'"),
        ({"name": "VNet", "droput_prob": 0.1}, "VNet has no parameter 'droput_prob'; did you mean 'dropout_prob_"),
        ({"name": "VNet", "in_channels": 4}, r"VNet: \['in_channels'\] follow from the data"),
        ({"name": "UNet", "channels": [4, 8, 16], "strides": [2]}, "network UNet refused .*`strides` should equal"),
        ({"dropout": 1}, "a network needs a name"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_network(spec, in_channels=1, out_channels=2, patch_size=(32, 32, 32))


@pytest.mark.parametrize(("name", "remedy"), [("DynUNet", "or strides"), ("UNETR", "or img_size")])
def test_networks_built_for_a_patch_ask_for_it(name, remedy):
    with pytest.raises(ConfigError, match=rf"network {name}: .* pass patch_size {remedy}"):
        build(name, patch_size=None)


def test_a_patch_too_small_for_a_u_is_refused():
    with pytest.raises(ConfigError, match=r"patch size \(8, 8, 8\) is too small to plan a U-Net"):
        plan_topology((8, 8, 8))


OFFERED = (
    *("AHNet", "AttentionUnet", "BasicUNet", "BasicUNetPlusPlus", "DynUNet", "FlexibleUNet", "HighResNet"),
    *("MedNeXt", "MedNeXtB", "MedNeXtL", "MedNeXtM", "MedNeXtS"),
    *("PlainConvUNet", "ResEncUNet", "SegResNet", "SegResNetDS", "SwinUNETR", "UNETR", "UNet", "VNet"),
)


def test_every_network_that_is_offered_gives_logits_on_the_grid_of_an_image_and_no_other_is():
    assert [name for name in NETWORKS if NETWORKS.get_source(name) is None] == list(OFFERED)
    sides = {"AHNet": (128, 128, 32), "UNETR": (32, 32, 32)}
    for name in OFFERED:
        net = build_network({"name": name}, in_channels=2, out_channels=3, patch_size=(32, 32, 32)).to("meta")
        image = torch.empty(2, 2, *sides.get(name, (64, 64, 64)), device="meta")
        for mode in (True, False):
            output = net.train(mode)(image)
            logits = output[0] if isinstance(output, list) else output
            assert logits.shape == (2, 3, *image.shape[2:]), name


@pytest.mark.parametrize(("name", "near"), [("DynUnet", "DynUNet"), ("Unet", "UNet"), ("basicunet", "BasicUNet")])
def test_monais_other_spellings_lead_to_the_offered_name(name, near):
    with pytest.raises(ConfigError, match=rf"no network is called '{name}'; did you mean .*'{near}'"):
        build(name)
