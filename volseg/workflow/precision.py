"""Choose the numeric precision of a training step.

``auto`` means bfloat16 on a GPU with units for it, float16 with loss scaling on older ones (V100), float32 on CPU.
``torch.cuda.is_bf16_supported`` also counts emulation, so the compute capability decides.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from volseg.device.gpus import get_capability, is_gpu
from volseg.errors import ConfigError

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
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
