"""The rules for accepted sizes against the networks' behaviour."""

import itertools
from functools import partial

import pytest
import torch
from monai.networks import nets
from torch import nn

from volseg.errors import GridError
from volseg.models.grids import GridRule, grid_divisors, grid_rule, probe_grid_rule, run_on_copies
from volseg.models.networks import DynUNet, build_network


def really_takes(net: nn.Module, sides, device: str = "cpu") -> bool:
    """Run the network in training mode, with its values or on shapes only."""
    try:
        with torch.no_grad():
            output = net.train()(torch.zeros(1, 1, *sides, device=device))
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
    "name", ["UNet", "DynUNet", "anisotropic DynUNet", "SegResNet", "AttentionUnet", "BasicUNet", "MedNeXt"]
)
def test_rules_are_the_brute_force_truth(name):
    net = small(name)
    rule = grid_rule(net)
    for sides in itertools.product([8, 16, 17], repeat=3):
        if rule.takes(sides):
            assert really_takes(net, sides), sides
    net.to("meta")
    for axis, side in itertools.product(range(3), SIDES):
        sides = [32, 32, 32]
        sides[axis] = side
        assert rule.takes(sides) == really_takes(net, sides, "meta"), sides


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
    with pytest.raises(GridError, match=r"accepts only volumes of \(32, 48, 32\) voxels, got \(33, 48, 32\)"):
        rule.sides((33, 48, 32))


class Thirds(nn.Module):
    """A user's own network that divides D by 3, H by 1 and W by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(2, 3, (3, 1, 4), stride=(3, 1, 4))
        self.up = nn.ConvTranspose3d(3, 2, (3, 1, 4), stride=(3, 1, 4))

    def forward(self, x):
        return self.up(self.down(x)) + x


class SharesAll(nn.Module):
    """A module under two names, and a weight in two modules; it accepts even sides only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.BatchNorm3d(1))
        self.again = nn.ModuleList([self.first])
        self.tied = nn.Conv3d(1, 1, 3, padding=1)
        self.tied.weight = self.first[0].weight

    def forward(self, x):
        x = self.tied(self.again[0](x))
        return x + nn.functional.interpolate(nn.functional.avg_pool3d(x, 2), scale_factor=2)


def list_state(net: nn.Module) -> list[object]:
    """Return everything that a trial may change: tensors, their values, modes, the generator."""
    parts = list(net.named_modules())
    places = [(name, key, id(tensor)) for name, part in parts for key, tensor in part._parameters.items()]
    values = [(key, tensor.device.type, tensor.tolist()) for key, tensor in net.state_dict().items()]
    return [places, values, [part.training for _, part in parts], torch.get_rng_state().tolist()]


@pytest.mark.parametrize(("net", "divisors"), [(Thirds(), (3, 1, 4)), (SharesAll(), (2, 2, 2))], ids=["user", "shared"])
def test_an_unknown_module_is_tried_and_left_as_it_was(net, divisors):
    """The first answer left shared layers on the meta device: the network could not be trained."""
    next(net.eval().children()).train()
    before = list_state(net)
    assert grid_rule(net) == GridRule(divisors, divisors)
    assert list_state(net) == before
    with pytest.raises(RuntimeError):  # no network here takes five channels
        run_on_copies(net, partial(torch.empty_like, device="meta"), torch.empty(1, 5, 12, 12, 12, device="meta"))
    assert list_state(net) == before


def test_batch_norm_needs_two_blocks():
    assert grid_rule(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2))).least_blocks == 2


def test_a_network_that_shrinks_its_input_is_refused():
    with pytest.raises(GridError, match=r"no output .*it returns \(1, 1, 30, 30, 30\).*divisors=\(16, 16, 16\)"):
        grid_divisors(nn.Conv3d(1, 1, 3))
    strided = DynUNet(3, 1, 2, [3] * 3, [2] * 3, [2] * 2, [2] * 3)
    with pytest.raises(GridError, match="returns no output on its input's grid"):
        probe_grid_rule(strided)
