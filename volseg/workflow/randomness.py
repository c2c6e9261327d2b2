"""Make a training repeatable: seeds, and kernels that sum in one order."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from volseg.data.threads import compute_in_one_thread
from volseg.errors import ConfigError
from volseg.parallel.devices import list_gpus


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(seed)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels, if ``wanted``; torch raises for the others and names them.

    Enter the context before the process first uses cuBLAS, which reads the size of its workspace once. Without a GPU
    one thread computes everything, as the order of sums would otherwise depend on the number of cores.

    Raises
    ------
    ConfigError
        If torch refuses an operator; the message names it.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    fills: Any = torch.utils.deterministic  # torch's stubs lack this setting
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    filled = fills.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    fills.fill_uninitialized_memory = False  # a pass over every new tensor, for debugging only
    try:
        with nullcontext() if list_gpus() else compute_in_one_thread():
            yield
    except RuntimeError as fault:
        if "have a deterministic" not in str(fault) and "not deterministic" not in str(fault):
            raise
        reason = str(fault).partition(", but you set")[0]
        raise ConfigError(
            f"training.deterministic is true, but {reason}. Choose another layer, loss or device, or set it to false"
        ) from fault
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
        fills.fill_uninitialized_memory = filled
