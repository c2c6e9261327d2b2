"""Losses of vectors, classes, counts and samples at given places: values and gradients are those of one device.

``test_operator_database`` compares every function; here are forms of call that its samples do not have.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from in_group import in_group
from torch import Tensor
from torch.utils._pytree import tree_leaves

from volseg.parallel import whole
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.spatial.volume import from_whole

SHAPE = (2, 3, 8, 6, 8)
CUTS = {"D": ((2,), None), "H": ((3,), (3,)), "grid": ((2, 4), (2, 2))}


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(y: Tensor) -> Tensor:
    """Return a label map (B, D, H, W) whose highest class lies in one slab alone."""
    return (y[:, 0].abs() < 2.9).long() + (y[:, 1] > 0).long()


def last(volume: Tensor) -> Tensor:
    return volume.movedim(1, -1)


EDGES = torch.linspace(-1, 1, 5, dtype=torch.float64)
PLACES = torch.tanh(torch.randn(2, 8, 6, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
TILT = torch.tensor([[[0.9, 0.1, 0, 0], [-0.1, 0.9, 0, 0], [0, 0, 1, 0.2]]], dtype=torch.float64).expand(2, 3, 4)

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "cosine similarity named, broadcast": lambda x, y: F.cosine_similarity(x1=x, x2=y[:1], dim=1, eps=0.1),
    "cosine similarity over D": lambda x, y: F.cosine_similarity(x, y, dim=2),
    "cosine similarity of zeros": lambda x, y: F.cosine_similarity(x * 0, y, dim=-1),
    "pairwise distance": lambda x, y: F.pairwise_distance(last(x), last(y), p=1, keepdim=True),
    "triplet of a distance": lambda x, y: F.triplet_margin_with_distance_loss(
        x, y, y.flip(0), distance_function=lambda a, b: (a - b).abs().mean(1)
    ),
    "gaussian": lambda x, y: F.gaussian_nll_loss(x, y, y.square(), full=True, eps=0.5),
    "multilabel": lambda x, y: F.multilabel_soft_margin_loss(last(x), (last(y) > 0).double(), EDGES[:3] + 2),
    "sum by the old name": lambda x, y: F.mse_loss(x, y, size_average=False),
    "one-hot": lambda x, y: F.one_hot(classes(y)).movedim(-1, 1) * x,
    "is in the volume": lambda x, y: torch.isin(torch.tensor([0, 7]), classes(y)),
    "where": lambda x, y: torch.where(y > 1),
    "nonzero": lambda x, y: [classes(y).nonzero(), torch.nonzero(classes(y), as_tuple=True), torch.argwhere(y > 1)],
    "integral over uneven steps": lambda x, y: torch.trapezoid(x, EDGES[:3], dim=1),
    "sampled": lambda x, y: F.grid_sample(x, PLACES, align_corners=False),
    "places cut": lambda x, y: F.grid_sample(random(3), last(x).tanh(), align_corners=True, padding_mode="border"),
    "turned": lambda x, y: F.grid_sample(x, F.affine_grid(TILT, x.shape, align_corners=False), align_corners=False),
    "whole": lambda x, y: whole(lambda a, *, b: (a * b).cumsum(2).flip(2))(x, b=y),
}

with suppress(ValueError):  # torch 2.8 takes variances of the volume's own shape only
    F.gaussian_nll_loss(random(0), random(1), random(1).square()[:, :1])
    CALLS["gaussian, a variance per voxel"] = lambda x, y: F.gaussian_nll_loss(
        x, y, y.square()[:, :1], reduction="none"
    )


def outcome(call: Callable, x: Tensor, y: Tensor) -> list[Tensor]:
    results = [v.full_tensor() if isinstance(v, ShardedVolume) else v for v in tree_leaves(call(x, y))]
    differentiable = [result for result in results if result.requires_grad]
    for result in differentiable:
        weights = torch.linspace(1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        (result * weights).sum().backward(retain_graph=True)
    return results


@pytest.mark.filterwarnings("ignore:F.grid_sample may read", "ignore:size_average and reduce args")
@pytest.mark.parametrize("sharded", [False, True], ids=["other whole", "other sharded"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_slabs_equals_that_on_the_volume(name: str, cut: str, sharded: bool) -> None:
    dims, grid = CUTS[cut]
    devices = ["cpu", *(f"cpu:{index}" for index in range(1, 2 if grid is None else 3 if cut == "H" else 4))]
    context = Context(LocalDevices(devices, grid))
    x, y = random(0).requires_grad_(), random(1)
    expected = outcome(CALLS[name], x, y)
    image = random(0).requires_grad_()
    actual = outcome(CALLS[name], from_whole(image, dims, context), from_whole(y, dims, context) if sharded else y)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(image.grad, x.grad)


def test_wrong_classes_are_refused_wherever_they_lie() -> None:
    labels = torch.zeros(1, 8, 4, 4, dtype=torch.int64)
    for value, message in ((3, "smaller than num_classes"), (-1, "must be non-negative")):
        labels[0, 7, 0, 0] = value
        volume = from_whole(labels, (1,), Context(LocalDevices(["cpu", "cpu:1"])))
        with pytest.raises(RuntimeError, match=message):
            F.one_hot(volume, 3)


def test_calls_on_processes_equal_those_on_one_device() -> None:
    in_group(2, check_calls)


def check_calls() -> None:
    """Compare the calls of this file and of another one where each process holds one slab."""
    import test_gradients_of_volumes as gradients  # beside this file; pytest does not look there

    context = Context(ProcessGroupShards(dist.group.WORLD, (2,), torch.device("cpu")))
    for call in gradients.CALLS.values():
        check_call(call, gradients.random, context)
    for call in CALLS.values():
        check_call(partial(outcome, call), random, context)


def check_call(call: Callable[[Any, Any], Any], make: Callable[[int], Tensor], context: Context) -> None:
    x, volume = make(0).requires_grad_(), from_whole(make(0), (2,), context)
    volume.requires_grad = True
    expected = [*tree_leaves(call(x, make(1))), x.grad]
    found = [*tree_leaves(call(volume, from_whole(make(1), (2,), context))), volume.grad]
    torch.testing.assert_close(
        [v.full_tensor() if isinstance(v, ShardedVolume) else v for v in found if v is not None],
        [v for v in expected if v is not None],
    )
