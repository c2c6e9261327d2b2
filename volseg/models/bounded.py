"""Build a network only if its parameters fit into memory: a wrong number in a config costs seconds, not the machine."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from volseg.errors import ConfigError
from volseg.memory import available_bytes

__all__ = ["build_within_memory"]

BUILT_AT_ONCE = 1 << 30
"""Bytes of parameters up to which a network is built without a dry run."""

MOST_TENSORS = 5_000
"""Parameters and buffers; a FlexibleUNet of ResNet-200, the largest that MONAI offers, has 1,288."""

BUILT_AT_ONCE_TENSORS = 2_000

FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Functions of torch by which modules make their parameters."""


class _Budget(TorchFunctionMode):
    """Count what is made, and raise before the first tensor beyond a number of bytes is."""

    def __init__(self, num_bytes: int, num_tensors: int) -> None:
        super().__init__()
        self.free = num_bytes
        self.free_tensors = num_tensors
        self.exceeded = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, if what it makes is within the budget."""
        del types
        kwargs = kwargs or {}
        if func in FACTORIES:
            size = kwargs.get("size", args)
            size = size[0] if size and isinstance(size[0], list | tuple) else size
            if all(isinstance(side, int) for side in size):
                dtype = kwargs.get("dtype") or torch.get_default_dtype()
                self._take(math.prod(size) * dtype.itemsize)
        return func(*args, **kwargs)

    def _take(self, num_bytes: int) -> None:
        self.free -= num_bytes
        self.free_tensors -= 1
        if self.free_tensors < 0:
            self.exceeded = f"has more than {MOST_TENSORS} parameters and buffers"
        if self.free < 0:
            self.exceeded = "has parameters that do not fit into memory"
        if self.exceeded:
            raise MemoryError(self.exceeded)


def build_within_memory(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Return what ``build`` makes; a large network is first built on the meta device, which takes no memory.

    For networks of volseg and MONAI only: a network of the user's own may make any number of tensors and drop them.
    The random numbers are the same whether a first attempt ended within the network or not.

    Raises
    ------
    ConfigError
        If its parameters take more than half of the free memory, whose other half is for the weights that are loaded.
    """
    free = available_bytes() // 2
    first = (min(BUILT_AT_ONCE, free), BUILT_AT_ONCE_TENSORS, None)
    random_state = torch.get_rng_state()
    attempts = (first, (free, MOST_TENSORS, "meta"), (free, MOST_TENSORS, None))
    for number, (num_bytes, num_tensors, device) in enumerate(attempts):
        budget = _Budget(num_bytes, num_tensors)
        torch.set_rng_state(random_state)
        try:
            with budget, torch.device(device) if device else nullcontext():
                network = build()
        except Exception as fault:
            if budget.exceeded and number > 0:
                raise ConfigError(
                    f"network {name} {budget.exceeded}: needed are {free / 2**30:.1f} GiB at most, half of the free "
                    "memory; take fewer channels, blocks or stages"
                ) from fault
            if not (budget.exceeded or device):  # on the meta device a network that looks at values fails
                raise
        else:
            if device is None:
                return network
    raise AssertionError("the last attempt returns or raises")
