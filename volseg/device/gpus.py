"""Which GPUs this process sees, for whoever lies below ``volseg.parallel.devices``."""

import torch

__all__ = ["count_gpus", "uses_gpus"]


def count_gpus() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def uses_gpus() -> bool:
    """Tell whether this process has begun to use GPUs; to ask one before would take memory of it."""
    return torch.cuda.is_initialized()
