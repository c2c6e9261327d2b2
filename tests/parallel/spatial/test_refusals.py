"""Unsupported functions are refused with function, module and remedy, or gathered on request and logged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, PlacementError, UnsupportedOperatorError
from volseg.parallel import ModelParallel

VOLUME = torch.randn(1, 2, 8, 6, 4, generator=torch.Generator().manual_seed(0))


class Repeating(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, 2, 1, 1)


def build_repeating() -> nn.Module:
    return RunLayers(lambda net, x: net.twice(net.stem(x)), stem=nn.Conv3d(2, 2, 1), twice=nn.Sequential(Repeating()))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def checkpoint_reentrantly(net: Any, x: Tensor) -> Tensor:
    return checkpoint(net.conv, net.stem(x), use_reentrant=True).relu()


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "an operator along the cut": (
        build_repeating,
        ["repeat", "twice.0 (Repeating)", "(1, 2, 8, 6, 4)", "dim 2", "docs/spatial.md", "on_unsupported='gather'"],
    ),
    "a function outside the table": (
        lambda: RunLayers(lambda net, x: torch.fft.fftn(x, dim=(2, 3, 4)).abs()),
        ["fft_fftn", "has no sharded form"],
    ),
    "a custom autograd function, which would lose gradients": (
        lambda: RunLayers(lambda net, x: F.relu(Doubling.apply(x))),
        ["custom autograd.Function", "Doubling"],
    ),
    "reentrant checkpointing": (
        lambda: RunLayers(checkpoint_reentrantly, stem=nn.Conv3d(2, 2, 1), conv=nn.Conv3d(2, 2, 3, padding=1)),
        ["use_reentrant=False"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_function_its_module_and_the_remedy(name: str) -> None:
    build, parts = REFUSED[name]
    with pytest.raises(UnsupportedOperatorError) as caught:
        ModelParallel(build(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)
    assert not [part for part in parts if part not in str(caught.value)], caught.value
    assert isinstance(caught.value, NotImplementedError)


def test_gather_runs_it_whole_says_so_once_and_is_exact() -> None:
    net = build_repeating()
    model = ModelParallel(net, strategy="spatial", devices=["cpu"] * 2, on_unsupported="gather")
    with pytest.warns(UserWarning, match=r"repeat called from twice\.0 \(Rep.*runs on the gathered volume") as said:
        results = [model(VOLUME) for _ in range(2)]
    assert len(said) == 1
    torch.testing.assert_close(results[1], net(VOLUME))


def test_an_ordinary_tensor_takes_in_the_gathered_volume() -> None:
    def accumulate(net: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=x.dtype)
        total += x
        total[:, :1] = x[:, :1] * 2
        return total

    net, volume = RunLayers(accumulate), VOLUME.clone().requires_grad_()
    expected = net(VOLUME)
    result = ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"])(volume)
    assert type(result) is Tensor
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    torch.testing.assert_close(volume.grad, torch.tensor([2.0, 1.0]).reshape(1, 2, 1, 1, 1).expand(VOLUME.shape))


def test_reading_numbers_of_a_volume_is_refused() -> None:
    volume = ModelParallel(nn.Identity(), strategy="spatial", devices=["cpu"] * 2)(VOLUME)
    for read in (volume.tolist, volume.numpy, lambda: float(volume), lambda: bool(volume), lambda: 1.0 in volume):
        with pytest.raises(UnsupportedOperatorError, match=r"full_tensor\(\).*volseg\.parallel\.whole"):
            read()
    with pytest.raises(UnsupportedOperatorError, match=r"holds 2 slabs.*\.slabs"):
        volume.to_local()


def test_a_placed_model_is_not_moved() -> None:
    model = ModelParallel(nn.Conv3d(1, 1, 1), strategy="spatial", devices=["cpu"] * 2)
    for parent in (model, nn.Sequential(model)):
        with pytest.raises(PlacementError, match=r"placed on cpu and cannot be moved to meta; pass devices="):
            parent.to("meta")
    assert next(model.double().parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "diagonal"}, "strategy must be one of auto, spatial, pipeline, got 'diagonal'"),
        ({"strategy": "spatial", "split_size": 2}, "split_size=2 is not an option of the spatial split"),
        ({"strategy": "spatial", "on_unsupported": "hope"}, "'raise' or 'gather', got 'hope'"),
        ({"strategy": "spatial", "devices": ["cpu"] * 2, "axes": "Q"}, "D, H, W"),
        ({"strategy": "spatial", "devices": ["cpu"] * 3, "grid": (2, 2)}, "needs 4 devices, got 3"),
        ({"strategy": "spatial", "devices": ["cpu"], "mesh": "four"}, "DeviceMesh, or a group, got str"),
        ({"strategy": "spatial", "devices": ["cpu"] * 2, "checkpoint": "some"}, "got 'some'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        ModelParallel(nn.Conv3d(1, 1, 1), **arguments)


@pytest.mark.parametrize("norm", [nn.BatchNorm3d(2), nn.InstanceNorm3d(2)])
def test_a_norm_of_one_value_is_refused_as_torch_does(norm: nn.Module) -> None:
    image = torch.randn(1, 2, 1, 1, 1)
    for net in (norm, ModelParallel(norm, strategy="spatial", devices=["cpu"])):
        with pytest.raises(ValueError, match="Expected more than 1"):
            net(image)
