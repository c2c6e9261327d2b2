"""Keep large activations in host memory between the forward and the backward pass.

For volumes that fit no other way: each activation crosses the host's link twice. ``checkpoint`` comes first: it is
faster.
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
    """An activation in host memory, and where it came from."""

    host: Tensor
    device: torch.device


@contextmanager
def offloaded(smallest_bytes: int = SMALLEST_BYTES) -> Iterator[None]:
    """Move what autograd saves in this context to the host, and back when it is needed.

    A tensor that two operators save (a norm and the convolution behind it) crosses twice: its address says nothing
    about its identity, since freed memory is used again.
    """

    def pack(tensor: Tensor) -> Kept | _Away:
        # Not a block's input that torch's checkpointing saves: a volume's slabs are saved one by one.
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
        # Copied, also on the CPU: what is saved must not be changed by whoever reads it.
        return take(saved) if isinstance(saved, Kept) else saved.host.to(saved.device, non_blocking=True, copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
