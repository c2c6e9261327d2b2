"""Small constant tensors, made once per device.

To make one copies from the host, which a CUDA graph under capture refuses; the warm-up that a capture needs anyway
fills this cache.
"""

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["constant", "positions"]


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``values`` as a float32 tensor; not to be written to."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def positions(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... ``size - 1`` in float32; not to be written to."""
    return torch.arange(size, dtype=torch.float32, device=device)
