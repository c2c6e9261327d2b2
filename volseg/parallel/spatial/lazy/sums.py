"""Gradients of parameters that are added up over tiles."""

import torch
from torch import Tensor

__all__ = ["add_in_float32"]


def add_in_float32(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the sum of a total, None at first, and a part, None where none is asked for; half precision widened."""
    if part is None:
        return total
    wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
    return wide if total is None else total + wide
