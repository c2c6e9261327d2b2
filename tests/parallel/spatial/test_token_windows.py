"""Tokens padded, rolled, split into windows, merged and cropped, against the plain network.

Each shard computes large masks of shifted windows only for its own windows (``OwnRows``).
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, assert_small, attention_by_plain_forms, noted
from in_group import in_group
from monai.networks.nets.swin_unetr import BasicLayer
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from volseg.parallel import ModelParallel
from volseg.parallel.spatial.operators import operands
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


@contextmanager
def small_ones_count() -> Iterator[list[str]]:
    """Treat small differences like large ones; note each that shards compute by their own rows."""
    found: list[str] = []
    fits = operands._are_small_operands

    def note(*given: Any) -> bool:
        found.extend(["own rows"] * fits(*given))
        return fits(*given)

    with (
        patch.object(operands, "LARGE", 64),
        patch.object(operands, "GROWTH", 2),
        patch.object(operands, "_are_small_operands", note),
    ):
        yield found


def check_windows(name: str, way: str, by_rows: bool) -> None:
    """Compare a network, also with masks by own rows and attention in one kernel."""
    torch.manual_seed(0)
    make, size = NETS[name]
    with ExitStack() as stack:
        if by_rows:
            stack.enter_context(attention_by_plain_forms())
            found = stack.enter_context(small_ones_count())
        compare(make().double(), way, size)
        assert not by_rows or bool(found) == (name not in GATHERED)


GATHERED = ("fewer windows than shards",)


PLACES: tuple[str | int, ...] = (*LOCAL, 2, 3)
"""Ways in one process, and numbers of processes."""


@pytest.mark.parametrize(
    ("name", "place", "by_rows"),
    # Every two values meet.
    [(name, place, (i + j) % 2 == 1) for i, name in enumerate(NETS) for j, place in enumerate(PLACES)],
)
def test_windows_are_exact(name: str, place: str | int, by_rows: bool) -> None:
    if isinstance(place, int):
        in_group(place, check_windows, name, "processes", by_rows)
    else:
        check_windows(name, place, by_rows)


class Rolled(nn.Module):
    """A volume rolled along its cut; in groups of planes, and only some of them left."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.shift, self.group = 0, group

    def forward(self, volume: Tensor) -> Tensor:
        if self.group > 1:  # as a reversed window partition leaves them
            groups = (volume * 1.0).unflatten(2, (-1, self.group))
            volume = groups.flatten(2, 3)
        rolled = torch.roll(volume, (1, self.shift, -2), (3, 2, 4)) * torch.linspace(1.0, 2.0, volume.shape[3])[:, None]
        result: Tensor = rolled[:, :, :-1, 1:, ::2] if self.group > 2 else rolled
        return result


def compare_rolled(way: str) -> None:
    for planes, group in ((7, 1), (12, 2), (12, 3), (15, 5)):
        net = Rolled(group)
        model = WAYS[way](net)
        for net.shift in range(-planes - 2, 2 * planes, 1 if planes < 12 else 2):
            found = []
            for call in (net, model):
                image = make_image((planes, 3, 4)).requires_grad_()
                output = whole(call(image))
                output.square().sum().backward()
                found.append((output.detach(), image.grad))
            for got, wanted in zip(found[1], found[0], strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda text, s=net.shift: f"{s}: {text}")


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


class Used(nn.Module):
    """A difference that grows, used in some way; ``volume`` has four rows of windows."""

    def __init__(self, use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, volume: Tensor) -> Tensor:
        places = torch.arange(24.0, device=volume.device).reshape(4, 6).to(volume.dtype)
        places = places.remainder(5)
        result: Tensor = self.use(volume, places.unsqueeze(1) - places.unsqueeze(2), places)
        return result


def mask(difference: Tensor) -> Tensor:
    return difference.masked_fill(difference != 0, -100.0).masked_fill(difference == 0, 0.0)


def windows(volume: Tensor) -> Tensor:
    """Return the four planes of a volume as a matrix each."""
    return volume.movedim(2, 0).flatten(1).unflatten(1, (6, 6))


def ask_for_gradients(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    first, second = places.unsqueeze(1).clone(), places.unsqueeze(2).clone()
    other = first - second
    first.requires_grad_()
    view = difference.unsqueeze(0)
    difference.requires_grad_()
    (difference * 2.0).sum().backward()
    assert difference.requires_grad
    assert not other.requires_grad
    assert not (other * 1.0).requires_grad
    assert (view * 1.0).requires_grad
    assert difference.grad is not None
    return windows(volume) + other + difference.grad + (difference + view).detach()


def without_versions(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    with torch.inference_mode():
        total = float(difference.sum() + 1.0)
        other = places.unsqueeze(1) - places.unsqueeze(2)
    return windows(volume) + difference * total + other


def transformed(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    def run(row: Tensor) -> Tensor:
        return mask(row.unsqueeze(1) - row.unsqueeze(2))

    many = torch.arange(3 * 4 * 8.0, dtype=places.dtype).reshape(3, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own use of TorchScript
        found, tangents = torch.vmap(run)(many), torch.func.jvp(run, (many[0],), (many[1],))[1]
        traced = torch.jit.trace(run, (places,))
    return windows(volume) + found.var() + tangents.sum() + traced(places)


def differences_checkpointed(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    def run(given: Tensor) -> Tensor:
        return given * mask(places.unsqueeze(1) - places.unsqueeze(2))

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    given = torch.ones_like(difference).requires_grad_()
    checkpoint(run, given, use_reentrant=False, context_fn=contexts).sum().backward()
    assert given.grad is not None
    return windows(volume) + given.grad


USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mask": lambda v, d, p: windows(v) + mask(d),
    "unused": lambda v, d, p: v * 2.0,
    "returned": lambda v, d, p: mask(d),
    "checkpointed": lambda v, d, p: windows(v) + checkpoint(mask, d, use_reentrant=False),
    "gradients": ask_for_gradients,
    "inference mode": without_versions,
    "transforms": transformed,
    "differences checkpointed": differences_checkpointed,
}


@pytest.mark.parametrize("way", ["two", "three", "fixed order"])
@pytest.mark.parametrize("name", USES)
def test_a_difference_by_own_rows_equals_torchs_however_it_is_used(name: str, way: str) -> None:
    net = Used(USES[name])
    model = WAYS[way](copy.deepcopy(net))
    model.strategy.context.large_rows[4] = None
    with small_ones_count() as found:
        for step in range(2):
            image = make_image((4, 3, 3), step).repeat(1, 4, 1, 1, 1)[:1]
            torch.testing.assert_close(whole(model(image)), net(image), rtol=0, atol=1e-12)
    assert found


def test_a_network_that_cuts_no_large_tensor_keeps_its_differences() -> None:
    model = WAYS["two"](nn.Conv3d(1, 2, 3, padding=1))
    with small_ones_count() as found:
        model(torch.rand(1, 1, 4, 4, 4))
    assert not model.strategy.context.large_rows
    assert not found


def test_two_models_and_the_plain_network_share_a_mask() -> None:
    """Networks cache their masks in a function that all models of the process call."""
    kept: list[Tensor] = []

    def add_shared(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
        kept[:] = kept or [mask(difference)]
        return windows(volume) + kept[0]

    image = make_image((4, 3, 3)).repeat(1, 4, 1, 1, 1)[:1]
    wanted = Used(USES["mask"])(image)
    first = WAYS["two"](Used(add_shared))
    first.strategy.context.large_rows[4] = None
    with small_ones_count() as found:
        for call in (first, WAYS["three"](Used(add_shared)), WAYS["fast"](Used(add_shared)), Used(add_shared)):
            torch.testing.assert_close(whole(call(image)), wanted, rtol=0, atol=1e-12)
    assert found
