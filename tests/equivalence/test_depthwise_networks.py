"""A MedNeXt with our depthwise kernels equals the plain network, whole and cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from beside_plain import measure_rounding
from kernels import DEVICE, with_kernels
from monai.networks.nets import MedNeXt
from torch import Tensor, nn

from volseg.device.convolution import choice, depthwise
from volseg.parallel import ModelParallel, Spatial
from volseg.parallel.spatial.convolution import around


def take_float32(tensor: Tensor, weight: Tensor) -> bool:
    """Take float32, also on a CPU: the kernels add up in it, so that they can be held against float64.

    Of this network's convolutions those of more than a voxel are depthwise.
    """
    return tensor.dtype == weight.dtype == torch.float32 and weight.shape[2:].numel() > 1


def measure_errors(net: nn.Module, image: Tensor, shards: int, **options: Any) -> dict[str, float]:
    """Return how far slabs in float32 are from the plain network in float64."""

    def run(own: nn.Module) -> nn.Module:
        # Slabs of one process go the way of one each where sums have one order.
        return ModelParallel(own, Spatial(channels_last=True, **options), devices=[DEVICE] * shards)

    (errors,) = measure_rounding(net, image.requires_grad_(), run, dtype=None)
    return errors


@with_kernels
@pytest.mark.parametrize("shards", [1, 2])
def test_a_mednext_trains_with_them(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    names = ("forward", "input_gradient", "weight_gradient")
    for name in names:

        def note(name: str, compute: Callable[..., Tensor], *given: Any) -> Tensor:
            asked.append(f"{name}{', transposed' if given[-1].transposed else ''}{given[-1].stride[0]}")
            result = compute(*given)
            assert name == "weight_gradient" or result.stride(1) == 1
            return result

        monkeypatch.setattr(depthwise, name, partial(note, name, getattr(depthwise, name)))
    monkeypatch.setattr(choice, "_is_half", take_float32)
    told: dict[str, Any] = {"blocks_down": (1,), "blocks_up": (1,), "blocks_bottleneck": 1, "kernel_size": 3}
    wide = {"encoder_expansion_ratio": (2,), "decoder_expansion_ratio": (2,), "bottleneck_expansion_ratio": 2}
    torch.manual_seed(0)
    net = MedNeXt(3, 2, 1, 2, use_residual_connection=True, **told, **wide).to(DEVICE)
    errors = measure_errors(net, torch.randn(1, 1, 8, 4, 6, device=DEVICE), shards, fixed_order=shards > 1)
    # Strided and transposed ones among them, each in all directions.
    assert set(asked) == {f"{name}{way}" for name in names for way in ("1", "2", ", transposed2")}
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@with_kernels
@pytest.mark.parametrize("large", [0, around.LARGE])
@pytest.mark.parametrize("up", [(3, 2, 1, 1), (4, 2, 1, 0)])
def test_transposed_ones_between_the_planes_of_neighbours(
    up: tuple[int, int, int, int], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(name: str, compute: Callable[..., Tensor], *given: Any) -> Tensor:
        asked.append(name)
        return compute(*given)

    for name in ("forward", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(depthwise, name, partial(note, name, getattr(depthwise, name)))
    monkeypatch.setattr(choice, "_is_half", take_float32)
    monkeypatch.setattr(around, "LARGE", large)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 4, 1), nn.ConvTranspose3d(4, 4, *up, groups=4), nn.Conv3d(4, 2, 1)).to(DEVICE)
    errors = measure_errors(net, torch.randn(2, 1, 8, 4, 6, device=DEVICE), 2, fixed_order=True)
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    # Of each slab; what comes of the neighbours' planes apart is more.
    counts = {name: asked.count(name) for name in ("forward", "input_gradient", "weight_gradient")}
    assert counts["forward"] == 2
    assert all((count > 2) == (large == 0) for name, count in counts.items() if name != "forward")
