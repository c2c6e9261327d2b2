"""Networks with convolutions over groups of voxels, or with zero channels, equal the plain ones."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from beside_plain import check_beside_plain
from monai.networks.nets import DynUNet, HighResNet
from monai.networks.nets.highresnet import DEFAULT_LAYER_PARAMS_3D
from narrow_vnet import NarrowVNet
from torch import Tensor, nn

from volseg.device.convolution import choice, padded, space_to_channels
from volseg.device.convolution.choice import ConvolutionCall
from volseg.device.convolution.forms import Form, Groups, ZeroChannels
from volseg.device.convolution.settings import Settings
from volseg.parallel import ModelParallel, Spatial


def build_dynunet() -> nn.Module:
    return DynUNet(3, 1, 2, [3, 3, [1, 3, 3]], [1, 2, [1, 2, 2]], [2, [1, 2, 2]], filters=[4, 6, 8])


def build_highresnet() -> nn.Module:
    narrow = [{**row, "n_features": max(2, row["n_features"] // 16)} for row in DEFAULT_LAYER_PARAMS_3D[:-1]]
    kept = [{**row, "repeat": 1} if "repeat" in row else row for row in (*narrow, DEFAULT_LAYER_PARAMS_3D[-1])]
    return HighResNet(3, 1, 2, norm_type="instance", dropout_prob=0.0, layer_params=kept)


Network = tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]

NETWORKS: dict[str, Network] = {
    "DynUNet": (build_dynunet, (2, 1, 16, 8, 16), {"3, 3, 3", "1, 3, 3"}),
    "HighResNet": (build_highresnet, (1, 1, 16, 6, 12), {"3, 3, 3", "3, 3, 3 by 2", "3, 3, 3 by 4"}),
}


def name_kernel(weight: Tensor, settings: Settings) -> str:
    """Return the sides of a kernel, and its dilation where it has one."""
    dilated = f" by {settings.dilation[2]}" if settings.dilation[2] > 1 else ""
    return ", ".join(map(str, weight.shape[2:])) + dilated


FORMS: dict[str, tuple[ModuleType, Form]] = {
    "groups of 2": (space_to_channels, Groups(2)),
    "groups of 4": (space_to_channels, Groups(4)),
    # Its volumes are slices of others' channels: whatever reads them must go by their strides.
    "zeros in": (padded, ZeroChannels(True, False)),
    "zeros out": (padded, ZeroChannels(False, True)),
    "zeros in and out": (padded, ZeroChannels(True, True)),
}

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "all": {"checkpoint": "all"}, "fixed order": {"fixed_order": True}}


def check_form(
    name: str, network: Network, shards: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a network with convolutions in a form, on shards, and compare it with the plain one."""
    (module, form), (build, shape, kernels) = FORMS[name], network
    directions = ["forward", "input_gradient", "weight_gradient"]
    taken: dict[str, set[str]] = {}

    def list_forms(direction: str, call: ConvolutionCall) -> list[Form]:
        plain = call.settings.stride == (1, 1, 1) and call.settings.groups == 1 and not call.settings.transposed
        several = call.weight.shape[2:].numel() > 1
        return [form] if isinstance(form, Groups) or (plain and several) else []

    def note(direction: str, compute: Callable[..., Tensor], *given: Any, **settings: Any) -> Tensor:
        weight = given[1] if direction == "forward" else given[-2]
        taken.setdefault(direction, set()).add(name_kernel(weight, given[-1]))
        assert settings == form._asdict()
        return compute(*given, **settings)

    for direction in directions:
        monkeypatch.setattr(module, direction, partial(note, direction, getattr(module, direction)))
    monkeypatch.setattr(choice, "_list_forms", list_forms)
    torch.manual_seed(0)
    cut = {"fixed_order": True} if shards > 1 else {}
    check_beside_plain(
        build().double(),
        lambda net: ModelParallel(net, Spatial(channels_last=True, **{**cut, **options}), devices=["cpu"] * shards),
        torch.randn(shape, dtype=torch.float64),
    )
    assert set(taken) == set(directions)
    for direction, found in taken.items():
        assert found >= kernels, direction


PAIRS = [
    (list(NETWORKS)[(row + column) % 2], form, 1 + (row // 2 + column) % 2, option)
    for row, form in enumerate(FORMS)
    for column, option in enumerate(OPTIONS)
]
"""Every two values of network, form, shards and option meet."""


@pytest.mark.parametrize(("name", "form", "shards", "options"), PAIRS)
def test_a_network_trains_in_another_form(
    name: str, form: str, shards: int, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_form(form, NETWORKS[name], shards, OPTIONS[options], monkeypatch)


def test_a_deep_network_trains_with_channels_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # On one device: slabs of so few planes are cut along another dim than D, and their convolutions come to no table.
    check_form("zeros in and out", (NarrowVNet, (1, 1, 32, 16, 16), set()), 1, {}, monkeypatch)
