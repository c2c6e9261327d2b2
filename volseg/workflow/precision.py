"""Numeric precision of a training step.

``auto`` takes bfloat16 where the GPU has units for it, float16 with loss scaling on older ones (V100), float32 on CPU.
``torch.cuda.is_bf16_supported`` also counts emulation, so the compute capability decides.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from volseg.errors import ConfigError

__all__ = ["PRECISIONS", "Precision", "PrecisionName"]

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = ("auto", "fp32", "bf16", "fp16")

_AMPERE = (8, 0)


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
        if name not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")
        if name == "auto":
            if device.type != "cuda":
                name = "fp32"
            else:
                name = "bf16" if torch.cuda.get_device_capability(device) >= _AMPERE else "fp16"
        if name == "fp16" and device.type != "cuda":
            raise ConfigError(f"precision fp16 needs a GPU, got device {device}; use fp32, bf16 or auto")
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return cls(device.type, dtypes[name])

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler; it is idle unless the precision is float16."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)
