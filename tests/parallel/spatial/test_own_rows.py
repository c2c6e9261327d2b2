"""Masks of shifted windows, of which each shard computes those of its own windows, against the plain network."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from beside_plain import WAYS, attention_by_plain_forms, check_beside_plain
from in_group import in_group
from monai.networks.nets.swin_unetr import BasicLayer
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial.operators import operands
from volseg.parallel.verification.comparison import whole

SIZES = {"even": (8, 4, 4), "uneven": (9, 5, 4)}


class Shifted(nn.Module):
    """MONAI's blocks of shifted windows, between convolutions; a level behind them has no mask of its own."""

    def __init__(self, checkpoints: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 2, 3, padding=1)
        self.layer = BasicLayer(8, blocks, 2, (2, 4, 2), [0.0] * blocks, use_checkpoint=checkpoints)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.last(self.layer(self.first(image)))
        return result


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


def change_whole(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    filled = mask(difference)
    filled[1, 2] = 3.0
    return windows(volume) + filled


def read_between(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    filled = mask(difference)
    total = difference.abs().sum()
    return windows(volume) + filled + total


class Halved(torch.autograd.Function):
    """A custom function, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        return given / 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        return gradient * given


def in_a_list(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    both = torch.stack([difference, mask(difference)]).sum(0)
    rows = torch.stack([row * 2.0 for row in mask(difference)])
    return windows(volume) + both.neg() + rows + torch.from_numpy(difference.numpy().copy())


def change_before(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    filled = mask(difference)
    difference.add_(1.0)
    return windows(volume) + filled


def change_source(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    filled = mask(difference)
    places.add_(torch.arange(6.0, device=places.device))
    return windows(volume) + filled


def change_uncounted(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    """Change what torch counts no change of."""
    filled = mask(difference)
    places.data.add_(torch.arange(6.0, device=places.device))
    first, second = places.unsqueeze(1).clone(), places.unsqueeze(2).clone()
    other = first - second
    first.data = second.squeeze(2).unsqueeze(1) * 3.0
    difference.numpy()[:] = 7.0
    return windows(volume) + filled + other + difference


def change_shape(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
    view = difference.unsqueeze(0)
    filled = view.masked_fill(view == 0, 3.0)
    difference.add_(1.0)
    later = view.masked_fill(view == 2, 5.0)
    difference.transpose_(1, 2).unsqueeze_(0)
    return windows(volume) + view + filled + later + difference * difference.shape[0] + difference


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
    "mask first": lambda v, d, p: mask(d) + windows(v),
    "difference": lambda v, d, p: windows(v) + d,
    "twice": lambda v, d, p: (windows(v) + mask(d)) * 2.0 + d,
    "view": lambda v, d, p: windows(v).unsqueeze(1) + mask(d).unsqueeze(1),
    "view behind": lambda v, d, p: windows(v).unsqueeze(1) + mask(d.unsqueeze(-3)),
    "view in front": lambda v, d, p: windows(v).unsqueeze(0) + mask(d.unsqueeze(0)),
    "by keyword": lambda v, d, p: windows(v) + d.unsqueeze(dim=0).squeeze(0),
    "product": lambda v, d, p: windows(v) * d,
    "join": lambda v, d, p: torch.cat([windows(v), d], 1),
    "other operators": lambda v, d, p: windows(v) + d.abs().cumsum(0),
    "whole": lambda v, d, p: v * mask(d).mean() + d.size(0) + len(d) + d.dim() + d.shape[1],
    "other dim": lambda v, d, p: windows(v).transpose(0, 1) + d.transpose(0, 1),
    "changed": change_whole,
    "unused": lambda v, d, p: v * 2.0,
    "read first": lambda v, d, p: windows(v) + mask(d) * float(d.sum() == d.sum()),
    "read between": read_between,
    "read between, written": lambda v, d, p: v * d.sum() + mask(d).sum(),
    "custom function": lambda v, d, p: windows(v) + Halved.apply(d),
    "in a list": in_a_list,
    "chosen": lambda v, d, p: windows(v) + torch.where(d != 0, d.new_tensor(-1.0), 0.0) + (d == 0).any(),
    "checkpointed": lambda v, d, p: windows(v) + checkpoint(mask, d, use_reentrant=False),
    "returned": lambda v, d, p: mask(d),
    "changed before": change_before,
    "source changed": change_source,
    "changed uncounted": change_uncounted,
    "changed shape": change_shape,
    "gradients": ask_for_gradients,
    "inference mode": without_versions,
    "transforms": transformed,
    "differences checkpointed": differences_checkpointed,
}

REFUSED = {"custom function", "in a list", "other operators", "changed shape", "changed uncounted"}
"""What a volume refuses, and an ordinary tensor does not."""

LOCAL = ("fast", "two", "three", "fixed order", "two, recomputed")


@contextmanager
def small_ones_count() -> Iterator[list[str]]:
    """Take small differences for large ones; note each that the shards compute by their own rows."""
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


@pytest.fixture
def found() -> Iterator[list[str]]:
    """Take small differences for large ones; note each that the shards compute by their own rows."""
    with small_ones_count() as noted:
        yield noted


def make_image(size: str) -> Tensor:
    return torch.rand(2, 1, *SIZES[size], generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", LOCAL)
def test_shifted_windows_are_exact(way: str, size: str, checkpoints: bool, found: list[str]) -> None:
    torch.manual_seed(0)
    plain = Shifted(checkpoints).double()
    for context in (nullcontext(), attention_by_plain_forms()):
        found.clear()
        with context:
            check_beside_plain(plain, WAYS[way], make_image(size), steps=3)
        assert bool(found) == (way != "fast")


def compare_in_process(size: str) -> list[str]:
    torch.manual_seed(0)
    with small_ones_count() as noted:
        for context in (nullcontext(), attention_by_plain_forms()):
            with context:
                check_beside_plain(Shifted().double(), WAYS["processes"], make_image(size), steps=3)
    return noted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_are_exact(processes: int, size: str) -> None:
    for noted in in_group(processes, compare_in_process, size):
        assert noted


@pytest.mark.parametrize("way", ["two", "three", "fixed order"])
@pytest.mark.parametrize("name", USES)
def test_whoever_reads_it_gets_what_torch_computes_or_is_refused(name: str, way: str, found: list[str]) -> None:
    net = Used(USES[name])
    model = WAYS[way](copy.deepcopy(net))
    model.strategy.context.large_rows[4] = None
    for step in range(2):
        image = torch.rand(1, 4, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        with pytest.raises(UnsupportedOperatorError) if name in REFUSED else nullcontext():
            torch.testing.assert_close(whole(model(image)), net(image), rtol=0, atol=1e-12)
    assert found


def test_no_network_is_looked_at_that_cuts_nothing_large(found: list[str]) -> None:
    model = WAYS["two"](nn.Conv3d(1, 2, 3, padding=1))
    model(torch.rand(1, 1, 4, 4, 4))
    assert not model.strategy.context.large_rows
    assert not found


def test_a_mask_that_two_models_and_the_plain_network_share(found: list[str]) -> None:
    """Networks cache their masks in a function, which every model of the process calls."""
    kept: list[Tensor] = []

    def add_shared(volume: Tensor, difference: Tensor, places: Tensor) -> Tensor:
        kept[:] = kept or [mask(difference)]
        return windows(volume) + kept[0]

    image = torch.rand(1, 4, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = Used(USES["mask"])(image)
    first = WAYS["two"](Used(add_shared))
    first.strategy.context.large_rows[4] = None
    for call in (first, WAYS["three"](Used(add_shared)), WAYS["fast"](Used(add_shared)), Used(add_shared)):
        torch.testing.assert_close(whole(call(image)), wanted, rtol=0, atol=1e-12)
    assert found
