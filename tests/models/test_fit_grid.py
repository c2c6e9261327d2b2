"""`FitGrid` accepts any size, returns the same size, and changes nothing else."""

import copy
import logging
from typing import NamedTuple

import pytest
import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from torch import nn
from torch.nn.functional import pad

from volseg.models.fit_grid import FitGrid
from volseg.models.networks import build_network
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

FEW = {"filters": [4, 4, 8, 8]}


def dynunet(**parameters):
    torch.manual_seed(0)
    spec = {"name": "DynUNet", **FEW, **parameters}
    return build_network(spec, in_channels=1, out_channels=3, patch_size=(40, 56, 40))


def volume(*sides, batch=1):
    return torch.randn(batch, 1, *sides, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sides", [(16, 24, 8), (18, 24, 17), (3, 40, 24), (1, 1, 1)])
def test_output_is_the_crop_of_the_padded_run(sides):
    net, x = dynunet(), volume(*sides)
    fitted = FitGrid(net)
    more = [whole - side for whole, side in zip(fitted.rule.sides(sides), sides, strict=True)]
    around = [(extra // 2, extra - extra // 2) for extra in more]
    expected = net(pad(x, [count for pair in reversed(around) for count in pair]))
    for dim, (side, (before, _)) in enumerate(zip(sides, around, strict=True), 2):
        expected = expected.narrow(dim, before, side)
    assert torch.equal(fitted(x), expected)


def test_it_says_so_once(caplog):
    fitted = FitGrid(dynunet())
    with caplog.at_level(logging.WARNING, logger="volseg"):
        fitted(volume(16, 16, 16))
        assert not caplog.records
        fitted(volume(18, 16, 16))
        fitted(volume(19, 16, 16))
    (record,) = caplog.records
    assert record.getMessage() == (
        "DynUNet needs sides divisible by 8x8x8: volumes, such as one of 18x16x16 voxels, are padded (to 24x16x16) "
        "and outputs cropped"
    )


def test_it_is_the_network_under_the_same_names():
    net = dynunet()
    fitted = FitGrid(net)
    assert list(nn.Sequential(fitted).state_dict()) == [f"0.{name}" for name in net.state_dict()]
    assert dict(fitted.named_parameters()).keys() == dict(net.named_parameters()).keys()
    fresh = {name: tensor + 1 for name, tensor in net.state_dict().items()}
    fitted.load_state_dict(fresh)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        fitted.load_state_dict({})
    assert not nn.Sequential(fitted).double().eval()[0].net.training
    assert next(net.parameters()).dtype == torch.float64
    twin = copy.deepcopy(fitted)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert next(twin.net.parameters()).abs().sum() == 0
    assert next(net.parameters()).abs().sum() > 0


@pytest.mark.parametrize("sides", [(16, 24, 16), (18, 25, 17)])
def test_deep_supervision_heads_lie_on_the_labels_grid(sides):
    fitted = FitGrid(dynunet(deep_supervision=True))
    outputs = fitted(volume(*sides, batch=2))
    assert isinstance(outputs, list)
    assert outputs[0].shape[2:] == sides
    whole = fitted.rule.sides(sides)
    coarse = tuple(side // 2 for side in sides) if whole == sides else sides
    assert outputs[1].shape[2:] == coarse
    label = torch.randint(0, 3, (2, 1, *sides)).float()
    DeepSupervisionLoss(DiceCELoss(softmax=True, to_onehot_y=True))(outputs, label).backward()
    assert fitted.eval()(volume(*sides)).shape[2:] == sides


class Heads(NamedTuple):
    fine: torch.Tensor
    coarse: torch.Tensor


class Places(nn.Module):
    """Return the position of each voxel, on the grid and on the half grid."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        half = nn.functional.avg_pool3d(x, 2)
        if self.kind == "stack":
            return torch.stack([x, nn.functional.interpolate(half, scale_factor=2)], 1)
        return {"tuple": (x, half), "named": Heads(x, half), "dict": {"logits": x, "coarse": half, "norm": x.sum()}}[
            self.kind
        ]


def test_coarse_heads_do_not_shift_against_the_label():
    """A head of x itself stays within half a coarse voxel of x after padding by an odd number of voxels."""
    x = torch.arange(13.0).view(1, 1, 13, 1, 1).expand(1, 1, 13, 16, 16).contiguous()
    fitted = FitGrid(Places("tuple"), divisors=(8, 8, 8))
    fine, coarse = fitted(x)
    assert torch.equal(fine, x)
    assert coarse.shape == x.shape
    inner = slice(1, -1)  # at the ends a coarse voxel mixes in the padding
    assert (coarse - x)[:, :, inner].abs().max() <= 0.5


@pytest.mark.parametrize(("kind", "result"), [("tuple", tuple), ("named", Heads), ("stack", list), ("dict", dict)])
@pytest.mark.parametrize("sides", [(16, 16, 16), (13, 16, 15)])
def test_every_kind_of_output_is_fitted(kind, result, sides):
    outputs = FitGrid(Places(kind), divisors=(8, 8, 8))(volume(*sides))
    assert type(outputs) is result
    first = outputs["logits"] if kind == "dict" else outputs[0]
    assert torch.equal(first, volume(*sides))
    if kind == "dict":
        assert outputs["norm"].ndim == 0


def test_a_volume_that_is_cut_over_devices_is_fitted_too():
    fitted, x = FitGrid(nn.Conv3d(1, 2, 3, padding=1), divisors=(4, 4, 4)), volume(13, 16, 9)
    cut = from_whole(x, (2,), Context(LocalDevices(["cpu"] * 2)))
    torch.testing.assert_close(fitted(cut).full_tensor(), fitted(x))
