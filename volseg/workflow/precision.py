"""Choose the numeric precision of a training, and make it repeatable: seeds, and kernels that sum in one order.

``auto`` means bfloat16 on a GPU with units for it, float16 with loss scaling on older ones (V100), float32 on CPU.
``torch.cuda.is_bf16_supported`` also counts emulation, so the compute capability decides.
"""

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from volseg.data.threads import compute_in_one_thread
from volseg.device.gpus import get_capability, is_gpu
from volseg.errors import ConfigError
from volseg.parallel.devices import list_gpus

PRECISIONS: tuple[str, ...] = ("auto", "fp32", "bf16", "fp16")

_AMPERE = (8, 0)


def choose_dtype(name: str, capability: tuple[int, int] | None) -> torch.dtype:
    """Return the dtype that ``name`` means on a GPU of a compute capability, or on a CPU (None).

    Raises
    ------
    ConfigError
        For an unknown name.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
    if name == "auto":
        name = "fp32" if capability is None else "bf16" if capability >= _AMPERE else "fp16"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


@dataclass(frozen=True)
class Precision:
    """Precision of the forward pass on one type of device."""

    device_type: str
    dtype: torch.dtype

    @classmethod
    def choose(cls, name: str, device: torch.device) -> "Precision":
        """Return the precision that ``name`` means on ``device``.

        Raises
        ------
        ConfigError
            For an unknown name, or float16 on a CPU.
        """
        if name == "fp16" and not is_gpu(device):
            raise ConfigError(f"precision fp16 needs a GPU, got device {device}; use fp32, bf16 or auto")
        # A query to the driver, so only if it is needed.
        capability = get_capability(device) if name == "auto" and is_gpu(device) else None
        return cls(device.type, choose_dtype(name, capability))

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler; it is idle unless the precision is float16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


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
