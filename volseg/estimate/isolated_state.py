"""What a followed step neither finds around it nor leaves behind: autocast, gradients switched off, random numbers."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

__all__ = ["isolated_state"]


@contextmanager
def isolated_state() -> Iterator[None]:
    """Follow a step as if nothing was going on: the first batch that asks for a choice may come within autocast.

    The random numbers of torch, NumPy and Python go on afterwards as if nothing had been followed, so a training is the
    same, bit by bit, whether its plan was made in the same process.
    """
    python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (a network's own)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False, dtype=torch.bfloat16))
        stack.enter_context(_outermost_autocast())
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def _outermost_autocast() -> Iterator[None]:
    """Let the step's autocast be the outermost: it forgets its copies of weights at its end, and no other one does."""
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth):
            torch.autocast_increment_nesting()
