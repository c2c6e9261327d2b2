"""Numeric precision of a training step.

``auto`` takes bfloat16 where the GPU has units for it, float16 with loss scaling on older ones (V100), float32 on CPU.
``torch.cuda.is_bf16_supported`` also counts emulation, so the compute capability decides.
"""

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from volseg.data.threads import compute_in_one_thread
from volseg.device.gpus import find_capability, is_gpu
from volseg.errors import ConfigError
from volseg.parallel.devices import list_gpus

__all__ = ["PRECISIONS", "Precision", "PrecisionName", "choose_dtype", "deterministic", "seed_everything"]


PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = ("auto", "fp32", "bf16", "fp16")

_AMPERE = (8, 0)


def choose_dtype(name: str, capability: tuple[int, int] | None) -> torch.dtype:
    """Return what ``name`` means on a GPU of a compute capability, or on a CPU (None).

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
    """How the forward pass is computed on one type of device."""

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
        # Asked of the driver, so only where something follows from it.
        capability = find_capability(device) if name == "auto" and is_gpu(device) else None
        return cls(device.type, choose_dtype(name, capability))

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler; it is idle unless the precision is float16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)


# What makes a training repeatable: seeds, and kernels that sum in one order.


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(seed)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let only kernels run that give the same bits each time, if that is ``wanted``; torch refuses the others by name.

    Must begin before the process first uses cuBLAS, which reads the size of its workspace once. Without a GPU one
    thread computes everything: else the number of a process's cores would decide the order of sums.

    Raises
    ------
    ConfigError
        Where torch refuses an operator; names it.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    fills: Any = torch.utils.deterministic  # whose one setting torch's stubs do not know
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    filled = fills.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    fills.fill_uninitialized_memory = False  # a pass over every new tensor, to tell what reads before it writes
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
