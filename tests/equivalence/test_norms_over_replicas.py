"""Batch norms of replicas, which exchange statistics in kernels, equal one process with the whole batch.

Triton's interpreter runs the kernels of norms on CPUs here. They send through files that all processes have mapped,
in the place of GPUs' memory, or by messages.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import data_parallel_cases as cases
import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from kernels import INTERPRETED
from torch import Tensor, nn

from volseg.device.norm import choice
from volseg.device.peer.values import RelayedValues, ValueMailbox
from volseg.parallel.spatial.lazy import statistics
from volseg.parallel.spatial.transport import communicator, one_process, process_group

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRETED, reason="processes without GPUs, whose kernels are interpreted"),
]

CLOSE = 2e-5
"""Of float32, relative to the largest value: both sides round, and add in another order."""


class Norms(nn.Module):
    """Batch norms by themselves, behind a bias, in sums and pairs, without weights, frozen, and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 9, 3, padding=1), nn.BatchNorm3d(9), nn.LeakyReLU(0.1))
        self.left = nn.Sequential(nn.Conv3d(9, 4, 1), nn.BatchNorm3d(4, affine=False))
        self.right = nn.Sequential(nn.Conv3d(9, 4, 1, bias=False), nn.BatchNorm3d(4, track_running_stats=False))
        self.frozen = nn.BatchNorm3d(4)
        self.frozen.requires_grad_(False)
        self.given = nn.BatchNorm3d(4)
        self.last = nn.Sequential(nn.PReLU(4), nn.BatchNorm3d(4, momentum=None), nn.Conv3d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.frozen(torch.relu(self.left(x) + self.right(x))) + 1
        return self.last(self.given(x))

    def train(self, mode: bool = True) -> "Norms":
        super().train(mode)
        self.given.eval()
        return self


@contextmanager
def interpreted(way: str, folder: str) -> Iterator[None]:
    """Run norms' kernels in here: ``way`` is how replicas exchange, in mapped files or by messages."""

    def connect(group: dist.ProcessGroup, device: torch.device) -> ValueMailbox | None:
        count, rank = dist.get_world_size(group), dist.get_rank(group)
        if way == "messages" or count == 1:
            return None
        size = ValueMailbox.size(count)
        name = Path(folder) / "-".join(map(str, dist.get_process_group_ranks(group)))
        if rank == 0:
            name.write_bytes(bytes(count * size))
        dist.barrier(group)
        memory = torch.from_file(str(name), shared=True, size=count * size, dtype=torch.uint8)
        dist.barrier(group)
        boxes = [memory.data_ptr() + number * size for number in range(count)]
        return ValueMailbox(boxes, rank, device, memory=memory)

    with ExitStack() as stack:
        for module in (choice, one_process, process_group, communicator, statistics):
            stack.enter_context(patch.object(module, "takes", lambda tensor: tensor.dtype != torch.float64))
        stack.enter_context(patch.object(ValueMailbox, "connect", connect))
        yield


def train(way: str, data: int, spatial: int, kernels: str, folder: str, fixed: bool, half: bool) -> dict[str, Any]:
    """Train with unequal rows; return the results, with the rank's outputs."""
    torch.manual_seed(7)
    model = cases.wrap(Norms(), data, spatial, data, kernels, fixed=fixed)
    with interpreted(way, folder):
        found = take_steps(model, half, count_steps(data * spatial))
        if model.replicas.count > 1:
            kind = type(model.strategy.inner.context.over_replicas.values)
            assert kind is (RelayedValues if way == "messages" or kernels == "slabs 2" else ValueMailbox)
    return found


def count_steps(processes: int) -> int:
    """Return how many steps are taken: more processes wait for each other than there may be cores."""
    return 2 if processes <= 2 else 1


def take_steps(model: Any, half: bool, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers = torch.Generator().manual_seed(3)
    found: dict[str, Any] = {}
    for step in range(steps):
        whole = torch.randn(5, 1, 6, 3, 2, generator=numbers) * 3 + 2
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs, loss = cases.take_step(model, whole)
        rows = [n for replica in model.replicas.own for n in range(5)[model.replicas.deal(5)[replica]]]
        found |= {f"output {step} {row}": value for row, value in zip(rows, outputs[0].detach().float(), strict=True)}
        found[f"loss {step}"] = loss
        found |= {f"gradient {step} {key}": p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {key: value.clone() for key, value in model.state_dict().items()}


def train_plainly(steps: int, half: bool = False) -> dict[str, Any]:
    torch.manual_seed(7)
    return take_steps(cases.wrap(Norms(), 1, 1, 1, "torch", fixed=False), half, steps)


def check(found: dict[str, Any], wanted: dict[str, Any], close: float) -> None:
    largest = max(float(value.abs().max()) for key, value in wanted.items() if key.startswith("gradient"))
    wrong = {
        key: cases.measure(value, wanted[key], largest if key.startswith("gradient") else 1e-3)
        for key, value in found.items()
        if value.is_floating_point()
    }
    assert not {key: error for key, error in wrong.items() if not error <= close}
    assert not [key for key, value in found.items() if not value.is_floating_point() and not value.equal(wanted[key])]


@pytest.mark.parametrize(
    ("way", "data", "spatial", "kernels"),
    [
        ("memory", 2, 1, "fast"),
        ("messages", 2, 1, "fast"),
        ("messages", 2, 1, "slabs 2"),
        ("memory", 3, 1, "fast"),
        ("memory", 2, 2, "slabs"),
        ("messages", 2, 2, "slabs"),
    ],
)
def test_replicas_train_as_one_process(way: str, data: int, spatial: int, kernels: str, tmp_path: Path) -> None:
    wanted = train_plainly(count_steps(data * spatial))
    ranks = in_group(data * spatial, train, way, data, spatial, kernels, str(tmp_path), False, False)
    for found in ranks:
        check(found, wanted, CLOSE)
    shared = [{key: value for key, value in found.items() if not key.startswith("output")} for found in ranks]
    assert not [names for pair in pairwise(shared) if (names := cases.list_differences(*pair))]


def test_in_half_precision(tmp_path: Path) -> None:
    wanted = train_plainly(2, half=True)
    for found in in_group(2, train, "memory", 2, 1, "fast", str(tmp_path), False, True):
        check(found, wanted, 0.05)


def test_the_way_changes_no_bit_where_the_order_is_fixed(tmp_path: Path) -> None:
    """Through memory, and by messages with both slabs of a replica in one process."""
    kept = in_group(4, train, "memory", 2, 2, "slabs", str(tmp_path), True, False)
    fewer = in_group(2, train, "messages", 2, 1, "slabs 2", str(tmp_path), True, False)
    for rank in range(4):
        first = [key for key in kept[rank] if key.startswith(("output 0", "loss 0", "gradient 0"))]
        assert len(first) > 10
        assert not [key for key in first if not kept[rank][key].equal(fewer[rank // 2][key])]
