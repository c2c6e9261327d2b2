"""What the rules say against what the networks do."""

import itertools

import pytest
import torch
from monai.networks import nets
from torch import nn

from volseg.errors import GridError
from volseg.models import DynUNet, GridRule, build_network, grid_divisors, grid_rule
from volseg.models.grids import probe_grid_rule


def really_takes(net: nn.Module, sides) -> bool:
    """Run the network, with its values, in training mode."""
    try:
        with torch.no_grad():
            output = net.train()(torch.zeros(1, 1, *sides))
    except (RuntimeError, ValueError):
        return False
    output = output[0] if isinstance(output, list) else output
    return tuple(output.shape[2:]) == tuple(sides)


def small(name: str) -> nn.Module:
    """Return stock networks with the topology they have by default, and few channels."""
    few = {
        "UNet": {"channels": [2, 2, 2, 2, 2]},
        "DynUNet": {"filters": [2, 2, 2, 2], "deep_supervision": True},
        "anisotropic DynUNet": {"strides": [[1, 1, 1], [2, 2, 1], [2, 2, 2]], "filters": [2, 2, 2]},
        "SegResNet": {"init_filters": 8, "blocks_down": [1, 1, 1, 1]},
        "AttentionUnet": {"channels": [2, 2, 2, 2, 2]},
        "BasicUNet": {"features": [2, 2, 2, 2, 2, 2]},
        "MedNeXt": {"init_filters": 2, "blocks_down": [1, 1, 1, 1], "blocks_up": [1, 1, 1, 1], "blocks_bottleneck": 1},
    }[name]  # fmt: skip
    spec = {"name": name.split()[-1], **few}
    return build_network(spec, in_channels=1, out_channels=2, patch_size=(40, 56, 40))


SIDES = [4, 8, 12, 15, 16, 17, 24, 31, 48]


@pytest.mark.parametrize(
    "name",
    ["UNet", "DynUNet", "anisotropic DynUNet", "SegResNet", "AttentionUnet", "BasicUNet", "MedNeXt"],
)
def test_rules_are_the_brute_force_truth(name):
    net = small(name)
    rule = grid_rule(net)
    for axis, side in itertools.product(range(3), SIDES):
        sides = [32, 32, 32]
        sides[axis] = side
        assert rule.takes(sides) == really_takes(net, sides), sides
    for sides in itertools.product([8, 16, 17], repeat=3):
        if rule.takes(sides):
            assert really_takes(net, sides), sides


def test_vnet_takes_multiples_of_16():
    """One pass costs 45 million parameters, so the brute force runs on shapes only."""
    net, rule = nets.VNet(), grid_rule(nets.VNet())
    assert rule == GridRule((16, 16, 16), (16, 16, 16), least_blocks=2)
    on_meta = nets.VNet().to("meta").train()
    for side in (15, 16, 24, 32, 40, 48):
        try:
            taken = on_meta(torch.zeros(1, 1, side, 32, 32, device="meta")).shape[2] == side
        except (RuntimeError, ValueError):
            taken = False
        assert rule.takes((side, 32, 32)) == taken
    assert net.training


@pytest.mark.parametrize("name", ["UNet", "DynUNet", "anisotropic DynUNet"])
def test_probing_finds_what_the_strides_say(name):
    net = small(name)
    assert probe_grid_rule(net) == grid_rule(net)


def test_padded_sides_hold_the_volume_and_are_taken():
    for name in ("UNet", "anisotropic DynUNet", "BasicUNet"):
        rule = grid_rule(small(name))
        for sides in itertools.product([1, 7, 30], repeat=3):
            whole = rule.sides(sides)
            assert rule.takes(whole)
            assert all(long >= side for long, side in zip(whole, sides, strict=True))


def test_swin_unetr_and_unetr():
    assert grid_divisors(nets.SwinUNETR(1, 2, feature_size=12)) == (32, 32, 32)
    unetr = nets.UNETR(1, 2, img_size=(32, 48, 32), hidden_size=48, mlp_dim=96)
    rule = grid_rule(unetr)
    assert rule.fixed
    assert rule.sides((20, 48, 31)) == (32, 48, 32)
    with pytest.raises(GridError, match=r"takes volumes of \(32, 48, 32\) voxels only, got \(33, 48, 32\)"):
        rule.sides((33, 48, 32))


class Thirds(nn.Module):
    """A user's own network, which divides D by 3, H by 1 and W by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(2, 3, (3, 1, 4), stride=(3, 1, 4))
        self.up = nn.ConvTranspose3d(3, 2, (3, 1, 4), stride=(3, 1, 4))

    def forward(self, x):
        return self.up(self.down(x)) + x


def test_an_unknown_module_is_tried_and_left_as_it_was():
    net = Thirds().eval()
    net.down.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    assert grid_rule(net) == GridRule((3, 1, 4), (3, 1, 4))
    assert net.down.training
    assert not net.training
    assert not net.up.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_batch_norm_statistics_survive_the_trial():
    net = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2))
    assert grid_divisors(net) == (1, 1, 1)
    assert net[1].num_batches_tracked == 0
    assert net[1].running_mean.eq(0).all()
    assert grid_rule(net).least_blocks == 2


def test_a_network_that_shrinks_its_input_is_refused():
    with pytest.raises(GridError, match=r"Conv3d gives no output on its input's grid .*divisors=\(16, 16, 16\)"):
        grid_divisors(nn.Conv3d(1, 1, 3))
    strided = DynUNet(3, 1, 2, [3] * 3, [2] * 3, [2] * 2, [2] * 3)
    with pytest.raises(GridError, match="gives no output on its input's grid"):
        probe_grid_rule(strided)
