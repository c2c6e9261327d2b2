"""Where tests run Triton's kernels: on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``)."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton  # noqa: F401  (asked for by name: without it nothing would be interpreted)

DEVICE = "cpu" if INTERPRETED else "cuda"


def run_with_compiler(cache: Path, *arguments: str) -> str:
    """Return what a process of Python prints in which Triton compiles, whatever this process does with it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command, root = [sys.executable, *arguments], Path(__file__).parents[1]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, encoding="utf-8", check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


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
