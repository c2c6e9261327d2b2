"""Trials, measurements and attempts to record draw random numbers that do not count."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator

import torch

__all__ = ["own_random_numbers"]


@contextlib.contextmanager
def own_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the generators of the host, of Python, of NumPy (where it is in use) and of ``devices`` as they are."""
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state()
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(of_numpy)
