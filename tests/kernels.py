"""Where tests run Triton's kernels: on a GPU, or anywhere by Triton's interpreter (``TRITON_INTERPRET=1``)."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton  # noqa: F401  (asked for by name: without it nothing would be interpreted)

DEVICE = "cpu" if INTERPRETED else "cuda"


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random values in 16 bits with channels last."""
    return torch.randn(shape, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last_3d)


def with_kernels(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that runs kernels on ``DEVICE``."""
    marked: Callable[..., Any] = pytest.mark.kernels(test)
    return marked if INTERPRETED else pytest.mark.gpu(marked)


def fewer(cases: Sequence[Any], count: int) -> Sequence[Any]:
    """Return all cases for a GPU, and some for the interpreter, which takes seconds for what a GPU does in micros."""
    return cases[:count] if INTERPRETED else cases
