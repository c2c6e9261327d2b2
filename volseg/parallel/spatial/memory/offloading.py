"""Keep large activations in host memory between the forward and the backward pass.

Offloading is for volumes that fit in no other way: each activation crosses the host's link twice. ``checkpoint`` is
faster; try it first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from volseg.parallel.spatial.versions import Kept, keep, take
from volseg.parallel.spatial.volume import ShardedVolume

__all__ = ["offloaded"]

SMALLEST_BYTES = 2**20
"""Smaller tensors stay where they are: statistics, halos, most parameters."""


@dataclass(frozen=True, slots=True)
class _Away:
    """An activation in host memory, and its original device."""

    host: Tensor
    device: torch.device


@contextmanager
def offloaded(smallest_bytes: int = SMALLEST_BYTES) -> Iterator[None]:
    """Move the tensors that autograd saves in this block to the host, and back when they are needed.

    A tensor that two operators save (a norm and the convolution behind it) crosses twice: an address does not
    identify a tensor, since freed memory is reused.
    """

    def pack(tensor: Tensor) -> Kept | _Away:
        # Except a block's input, saved by torch's checkpointing: a volume's slabs are saved one by one.
        if (
            isinstance(tensor, ShardedVolume)
            or tensor.is_leaf
            or tensor.numel() * tensor.element_size() < smallest_bytes
        ):
            return keep(tensor)
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        return _Away(host, tensor.device)

    def unpack(saved: Kept | _Away) -> Tensor:
        # A copy, even on the CPU: readers must not change the saved tensor.
        return take(saved) if isinstance(saved, Kept) else saved.host.to(saved.device, non_blocking=True, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
