"""Residual networks on slabs of processes: sums with room for a halo, planes in a slab's own layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers
from in_group import in_group
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.spatial.convolution import around
from volseg.parallel.spatial.convolution import slab as slab_convolution


class Blocks(nn.Module):
    """A plain sum, one after a norm, and a wide halo after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv3d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.InstanceNorm3d(3)
        self.wide = nn.Conv3d(3, 3, 3, padding=4, dilation=4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x = x + self.first(x)
        x = F.relu(self.norm(self.second(x)) + x)
        return self.wide(F.relu(self.norm(self.third(x))))


def list_copies() -> list[bool]:
    """Return, for each slab that a convolution extends in a step, whether it was copied."""
    extend, copied = slab_convolution.extend, []
    places = (slab_convolution, around)  # inputs, and gradients

    def note(slab: Tensor, room: int, own: tuple[int, int]) -> Tensor:
        buffer = extend(slab, room, own)
        copied.append(buffer.untyped_storage().data_ptr() != slab.untyped_storage().data_ptr())
        return buffer

    torch.manual_seed(0)
    model = ModelParallel(Blocks(), strategy="spatial", channels_last=True)
    for place in places:
        place.extend = note
    try:
        model(torch.randn(1, 3, 24, 4, 4)).square().mean().backward()
    finally:
        for place in places:
            place.extend = extend
    return copied


def test_convolutions_behind_sums_copy_no_slab() -> None:
    """All but the first, whose input is a product, and in backward those of gradients written by norms."""
    for copied in in_group(2, list_copies):
        forward, backward = copied[:4], copied[4:]
        assert forward == [True, False, False, False]
        assert backward == [False, False]  # of the third and the second: the first one's input needs none


OPERATORS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.pad(x, (1, 0, 1, 0, 1, 0)),
    lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)),
    lambda x: x[:, :, 2:8],
    lambda x: x.flip(2),
]


class Moved(nn.Module):
    """Planes that move between shards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(4, 4, 3, padding=1)
        self.results: list[bool] = []
        self.gradients: list[bool] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found, features = [], self.stem(x)
        for operator in OPERATORS:
            given = features * 2.0
            given.slabs[0].register_hook(lambda gradient: self.gradients.append(is_last(gradient)))  # type: ignore[attr-defined]
            result = operator(given)
            self.results.append(is_last(result.slabs[0]))  # type: ignore[attr-defined]
            found.append((result * result).sum())
        return tuple(found)


def list_layouts() -> tuple[list[bool], list[bool]]:
    """Return whether results, and gradients, of operators that fetch planes have their channels last."""
    torch.manual_seed(0)
    net = Moved()
    outputs = ModelParallel(net, strategy="spatial", channels_last=True)(torch.randn(1, 4, 9, 6, 4))
    torch.stack(outputs).sum().backward()
    return net.results, net.gradients


def is_last(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1


def test_planes_that_are_fetched_keep_the_layout_forward_and_backward() -> None:
    for results, gradients in in_group(2, list_layouts):
        assert results == gradients == [True] * len(OPERATORS)


def change_norm(net: Any, x: Tensor) -> Tensor:
    """Change a norm's result, which has room for its halo, before and after a convolution reads it."""
    features = net.norm(x * 2.0)
    features.add_(1.0)
    result = net.conv(features)
    features.mul_(2.0)
    return result + features


def change_sum(net: Any, x: Tensor) -> Tensor:
    """Change a sum, which has room for its halo, after a convolution has read it."""
    total = x * 2.0 + x
    result = net.conv(total)
    total.mul_(2.0)
    return result + total


def change_the_input_of_a_convolution(run: Callable[[Any, Tensor], Tensor]) -> None:
    net = RunLayers(run, conv=nn.Conv3d(1, 1, 3, padding=1), norm=nn.InstanceNorm3d(1))
    model = ModelParallel(net, strategy="spatial")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(1, 1, 8, 4, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("run", [change_norm, change_sum])
def test_an_input_of_a_convolution_that_changes_in_place_is_refused(run: Callable[[Any, Tensor], Tensor]) -> None:
    in_group(2, change_the_input_of_a_convolution, run)
