"""Small constant tensors, made once per device.

To make one copies from the host, which cannot be recorded in a CUDA graph; the call that goes before a recording
anyway makes them. They live as long as the process and not as long as an augmentation: recordings read them at their
addresses, so none may ever be freed, and all augmentations of a device share these few hundred bytes per patch size.
"""

import torch
from torch import Tensor

from volseg.device.gpus import keeping

__all__ = ["constant", "positions"]


@keeping()
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``values`` as a float32 tensor; not to be written to."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@keeping()
def positions(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... ``size - 1`` in float32; not to be written to."""
    return torch.arange(size, dtype=torch.float32, device=device)
