"""What random networks found where each process holds one slab: a process that waits for another one.

``python test_spatial_dags_ranks.py FOLDER`` in each process of a group writes what it found.
"""

import contextlib
import copy
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel, launch
from volseg.parallel.sharding.verify import TOLERANCE, compare


class Net(nn.Module):
    """A convolution, and a function of it as ``forward``."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv3d(2, 2, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)


def volume() -> Tensor:
    return torch.randn(1, 2, 12, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def assigned(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x) * 1.0
    y[:, :, 0:1] = layer(x)[:, :, -1:] * layer.bias.sum()
    return y


def assign_planes_of_one_process() -> None:
    """The planes fell to one process, whose backward pass waited for ever for the other's part of their gradient."""
    torch.manual_seed(0)
    plain = Net(assigned).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial")
    errors = compare(plain, model, [volume()])
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, wrong


def change_the_input_of_one_process() -> None:
    """The network zeroes a plane of its input, which only its owner noticed: it waited to write the caller's tensor."""

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        x[:, :, 0] = 0
        return layer(x)

    torch.manual_seed(0)
    plain = Net(forward).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial")
    inputs = [volume(), volume()]
    outputs = [net(x) for net, x in zip((plain, model), inputs, strict=True)]
    torch.testing.assert_close(outputs[1].full_tensor(), outputs[0])
    torch.testing.assert_close(inputs[1], inputs[0])


CASES = {case.__name__: case for case in (assign_planes_of_one_process, change_the_input_of_one_process)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.suppress(ParallelError):  # the failing case's own test shows its traceback
        launch([__file__, str(folder)], 2)
    files = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.parametrize("name", CASES)
def test_processes(name: str, ranks: list[dict[str, str | None]]) -> None:
    for rank, found in enumerate(ranks):
        assert name in found, f"rank {rank} did not reach {name}: it or another one failed before"
        assert found[name] is None, f"rank {rank}: {found[name]}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # A rank that fails leaves the others waiting: not for long.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    results: dict[str, str | None] = {}
    path = folder / f"{dist.get_rank()}.json"
    for name, case in CASES.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = traceback.format_exc()
            break
        finally:
            path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # gloo's threads can linger at interpreter exit.
    sys.stdout.flush()
    os._exit(0)
