"""Networks whose convolutions are computed over groups of voxels, or with channels of zeros, equal the plain ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from every_pair import every_pair
from monai.networks.nets import DynUNet, HighResNet
from monai.networks.nets.highresnet import DEFAULT_LAYER_PARAMS_3D
from narrow_vnet import NarrowVNet
from torch import Tensor, nn

from volseg.device.convolution import choice, padded, space_to_channels
from volseg.device.convolution.forms import Form, Groups, ZeroChannels
from volseg.device.convolution.rules import ConvolutionCall
from volseg.device.convolution.settings import Settings
from volseg.parallel import ModelParallel, Spatial


def build_dynunet() -> nn.Module:
    return DynUNet(3, 1, 2, [3, 3, [1, 3, 3]], [1, 2, [1, 2, 2]], [2, [1, 2, 2]], filters=[4, 6, 8])


def build_highresnet() -> nn.Module:
    narrow = [{**row, "n_features": max(2, row["n_features"] // 16)} for row in DEFAULT_LAYER_PARAMS_3D[:-1]]
    kept = [{**row, "repeat": 1} if "repeat" in row else row for row in (*narrow, DEFAULT_LAYER_PARAMS_3D[-1])]
    return HighResNet(3, 1, 2, norm_type="instance", dropout_prob=0.0, layer_params=kept)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "DynUNet": (build_dynunet, (2, 1, 16, 8, 16), {"3, 3, 3", "1, 3, 3"}),
    "HighResNet": (build_highresnet, (1, 1, 16, 6, 12), {"3, 3, 3", "3, 3, 3 by 2", "3, 3, 3 by 4"}),
}


def train(net: nn.Module, plain: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, Tensor, Tensor]]:
    """Take two steps of both; return outputs, gradients, parameters and buffers of both, then those of evaluation."""
    pairs = []
    for step in range(2):
        x = torch.randn(shape, dtype=torch.float64)
        outputs = net(x), plain(x)
        for output in outputs:
            output.square().mean().backward()
        pairs.append((f"output {step}", outputs[0].detach(), outputs[1].detach()))
        for (name, one), (_, other) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
            if other.grad is None:  # of a head that this configuration leaves out
                continue
            pairs.append((f"gradient of {name} {step}", one.grad.clone(), other.grad.clone()))
            for own in (one, other):
                own.data.sub_(own.grad, alpha=0.1)
                own.grad = None
            pairs.append((f"{name} {step}", one.detach().clone(), other.detach().clone()))
    buffers = zip(net.named_buffers(), plain.named_buffers(), strict=True)
    pairs += [(name, one, other) for (name, one), (_, other) in buffers]
    net.eval()
    plain.eval()
    with torch.no_grad():
        pairs.append(("evaluated", net(x), plain(x)))
    return pairs


def check_training(
    build: Callable[[], nn.Module], shape: tuple[int, ...], shards: int, options: dict[str, Any]
) -> None:
    """Train a network on shards beside the plain one."""
    torch.manual_seed(0)
    net, plain = (build().double() for _ in range(2))
    plain.load_state_dict(net.state_dict())
    cut = {"fixed_order": True} if shards > 1 else {}
    ours = ModelParallel(net, Spatial(channels_last=True, **{**cut, **options}), devices=["cpu"] * shards)
    for label, got, wanted in train(ours, plain, shape):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9, msg=lambda text, label=label: f"{label}: {text}")


def name_kernel(weight: Tensor, settings: Settings) -> str:
    """Return the sides of a kernel, and its dilation where it has one."""
    dilated = f" by {settings.dilation[2]}" if settings.dilation[2] > 1 else ""
    return ", ".join(map(str, weight.shape[2:])) + dilated


OPTIONS = ([{}, {"checkpoint": "all"}, {"fixed_order": True}], ["plain", "all", "fixed order"])


@pytest.mark.parametrize(
    ("shards", "options", "voxels"),
    every_pair([1, 2], OPTIONS[0], [2, 4], ids=["12", OPTIONS[1], "24"]),
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_in_groups(
    name: str, shards: int, options: dict[str, Any], voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape, kernels = NETWORKS[name]
    taken: dict[str, set[str]] = {}

    def note(form: str, compute: Callable[..., Tensor], *given: Any, **group: int) -> Tensor:
        *_, weight, settings = given if form != "forward" else (*given[:2], *given[3:])
        assert group == {"voxels": voxels}
        taken.setdefault(form, set()).add(name_kernel(weight, settings))
        return compute(*given, **group)

    for form in ("forward", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(space_to_channels, form, partial(note, form, getattr(space_to_channels, form)))
    monkeypatch.setattr(choice, "_list_forms", lambda direction, call: [Groups(voxels)])
    check_training(build, shape, shards, options)
    assert set(taken) == {"forward", "input_gradient", "weight_gradient"}
    for form, found in taken.items():
        assert found >= kernels, form


WHERE = ([(True, False), (False, True), (True, True)], ["in", "out", "both"])


@pytest.mark.parametrize(
    ("shards", "options", "filled"),
    every_pair([1, 2], OPTIONS[0], WHERE[0], ids=["12", OPTIONS[1], WHERE[1]]),
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_with_channels_of_zeros(
    name: str, shards: int, options: dict[str, Any], filled: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volumes are slices of others' channels: whatever reads them must go by their strides."""
    build, shape, _ = NETWORKS[name]
    check_channels_of_zeros(build, shape, shards, options, filled, monkeypatch)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_deep_network_trains_with_channels_of_zeros(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # On two devices a volume of fewer than 32 planes is cut along its longest side, and the convolutions of slabs that
    # are cut along another dim than D come to no table of ours: they take the general exchange, and are torch's.
    check_channels_of_zeros(NarrowVNet, (1, 1, 32, 16, 16), shards, {}, (True, True), monkeypatch)


def check_channels_of_zeros(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    shards: int,
    options: dict[str, Any],
    filled: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def list_forms(direction: str, call: ConvolutionCall) -> list[Form]:
        plain = call.settings.stride == (1, 1, 1) and call.settings.groups == 1 and not call.settings.transposed
        return [ZeroChannels(*filled)] if plain and call.weight.shape[2:].numel() > 1 else []

    taken = set()

    def note(form: str, compute: Callable[..., Tensor], *given: Any, **wide: bool) -> Tensor:
        taken.add(form)
        return compute(*given, **wide)

    for form in ("forward", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(padded, form, partial(note, form, getattr(padded, form)))
    monkeypatch.setattr(choice, "_list_forms", list_forms)
    check_training(build, shape, shards, options)
    assert taken == {"forward", "input_gradient", "weight_gradient"}
