"""Tokens that are padded, rolled, taken apart into windows, put together and cropped, against the plain network."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, assert_small, noted
from in_group import in_group
from monai.networks.nets.swin_unetr import BasicLayer
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.verification.comparison import (
    compare_values,
    default_objective,
    eager_step,
    observe,
    observe_call,
    whole,
)

LOCAL = ("two", "three", "fixed order", "two, recomputed")


class Layers(nn.Module):
    """MONAI's blocks of windows and of shifted ones, layer behind layer, between convolutions."""

    def __init__(self, *windows: int, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)
        layers = [BasicLayer(4, 2, 2, (side, 2, 2), [0.0] * 2, use_checkpoint=checkpoints) for side in windows]
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.last(self.layers(self.first(image)))
        return result


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "padded": (lambda: Layers(4), (13, 5, 3)),
    "a window a shard": (lambda: Layers(5), (13, 4, 3)),
    "fewer windows than shards": (lambda: Layers(7), (7, 4, 3)),
    "nothing padded": (lambda: Layers(3), (9, 4, 2)),
    "windows that divide others": (lambda: Layers(2, 4), (11, 3, 3)),
    "windows of two sizes": (lambda: Layers(3, 2, 3), (11, 4, 3)),
    "checkpointed": (lambda: Layers(4, checkpoints=True), (13, 5, 3)),
}


def make_image(size: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 1, *size, generator=generator, dtype=torch.float64)


def compare(plain: nn.Module, way: str, size: tuple[int, ...]) -> None:
    """Train in passes that overlap, two in each step, and evaluate."""
    model = WAYS[way](copy.deepcopy(plain))
    images, found = [make_image(size, seed) for seed in (0, 1)], []
    for net in (plain, model):
        step = eager_step(lambda first, second, call=net: (call(first), call(second)), default_objective)
        found.append(observe(net, images, step, 2))
        net.eval()
        found[-1].append(observe_call(net, images[:1]))
    for wanted, got in zip(*found, strict=True):
        assert_small(compare_values(wanted, got).errors)


@pytest.mark.parametrize("way", LOCAL)
@pytest.mark.parametrize("name", NETS)
def test_windows_are_exact(name: str, way: str) -> None:
    torch.manual_seed(0)
    make, size = NETS[name]
    compare(make().double(), way, size)


def compare_in_process(name: str) -> None:
    torch.manual_seed(0)
    make, size = NETS[name]
    compare(make().double(), "processes", size)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", NETS)
def test_processes_are_exact(name: str, processes: int) -> None:
    in_group(processes, compare_in_process, name)


class Rolled(nn.Module):
    """A volume rolled along its cut; in groups of planes, and only some of them left."""

    def __init__(self, shift: int, group: int) -> None:
        super().__init__()
        self.shift, self.group = shift, group

    def forward(self, volume: Tensor) -> Tensor:
        if self.group > 1:  # as a reversed window partition leaves them
            groups = (volume * 1.0).unflatten(2, (-1, self.group))
            volume = groups.flatten(2, 3)
        rolled = torch.roll(volume, (1, self.shift, -2), (3, 2, 4)) * torch.linspace(1.0, 2.0, volume.shape[3])[:, None]
        result: Tensor = rolled[:, :, :-1, 1:, ::2] if self.group > 2 else rolled
        return result


def compare_rolled(way: str) -> None:
    for planes, group in ((7, 1), (12, 2), (12, 3), (15, 5)):
        for shift in range(-planes - 2, 2 * planes, 1 if planes < 12 else 2):
            net, found = Rolled(shift, group), []
            for call in (net, WAYS[way](net)):
                image = make_image((planes, 3, 4)).requires_grad_()
                output = whole(call(image))
                output.square().sum().backward()
                found.append((output.detach(), image.grad))
            for got, wanted in zip(found[1], found[0], strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda text, s=shift: f"{s}: {text}")


@pytest.mark.parametrize("way", ["two", "three", "fixed order"])
def test_rolls_are_exact(way: str) -> None:
    compare_rolled(way)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_rolls_of_processes_are_exact(processes: int) -> None:
    in_group(processes, compare_rolled, "processes")


def count_exchanges() -> list[tuple[int, int]]:
    """Return how often planes of tokens travel in a step, there and back, in each pass."""
    torch.manual_seed(0)
    net = ModelParallel(BasicLayer(4, 2, 2, (4, 2, 2), [0.0] * 2).double(), strategy="spatial")
    counts = []
    for step in range(3):
        image = torch.rand(1, 4, 11, 5, 3, dtype=torch.float64)
        image = (image + step).requires_grad_()
        moves = {name: getattr(ProcessGroupShards, name) for name in ("exchange", "give_back")}
        with noted(ProcessGroupShards, **moves) as found:
            output = net(image)
            there = found.count("exchange")
            output.full_tensor().sum().backward()
        counts.append((there, found.count("give_back")))
    return counts


def test_planes_travel_once_for_each_operator_that_moves_them() -> None:
    """Two blocks: padding, windows and back, cropping, and two rolls of one."""
    for counts in in_group(2, count_exchanges):
        assert counts == [(8, 8)] * 3


class Padded(nn.Module):
    """Tokens that are padded as for windows, and read as planes."""

    def forward(self, volume: Tensor) -> Tensor:
        tokens = volume.movedim(1, -1) * 2.0
        taken = F.pad(tokens, (0, 0, 0, 0, 0, 0, 0, 1)).unflatten(1, (-1, 4)).sum((2, -1))
        padded = F.pad(tokens, (0, 0, 0, 0, 0, 0, 0, 1))
        padded[:, 3:9, 1] = 5.0
        volume = padded.movedim(-1, 1)
        result: Tensor = F.avg_pool3d(volume, 3, 1, 1)[:, :, 1:] + taken.mean() + padded[:, -2].sum()
        return (
            result.flip(2) + F.pad(volume, (0, 0, 0, 0, 1, 1), mode="replicate")[:, :, 2:-1] * padded.cumsum(2).mean()
        )


@pytest.mark.parametrize("way", LOCAL)
def test_what_was_padded_to_windows_is_read_as_planes(way: str) -> None:
    net = Padded()
    model = WAYS[way](net)
    for step in range(3):
        image = make_image((15, 4, 3), step)
        torch.testing.assert_close(whole(model(image)), net(image), rtol=1e-12, atol=1e-12)
