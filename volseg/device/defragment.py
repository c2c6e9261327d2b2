"""Tensors that are moved together: what outlives a step lies among activations that are gone, and holds their memory.

torch's allocator gives memory back by whole segments. The optimizer's state comes into being at the end of the first
step, in pieces of what activations have left, and so do gradients. Moved away once, they hold their own segments alone.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from volseg.device.gpus import empty_cache, find_device, on_gpu
from volseg.device.torch_internals import PLAIN_TENSORS, count_references

__all__ = ["move_together"]


def move_together(tensors: Iterable[Tensor]) -> None:
    """Move tensors of one GPU to new memory, by way of the host's; give back to the GPU what is free then.

    The tensors stay the same objects. Those whose memory others use too (a view, a slice of a bucket) stay where they
    are, and so does what is on no GPU.

    Parameters
    ----------
    tensors
        Any number of times each.
    """
    own = count_references((torch.empty(1),), 0)[1]
    found = {id(tensor): tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS and on_gpu(tensor)}
    moved = [tensor for tensor in found.values() if _has_memory_of_its_own(tensor, own)]
    if not moved:
        return
    devices = [find_device(tensor) for tensor in moved]
    on_host = [tensor.detach().to("cpu", copy=True) for tensor in moved]
    for tensor, copy in zip(moved, on_host, strict=True):
        tensor.data = copy  # values lie somewhere at any time
    empty_cache(devices[0])
    for tensor, device in zip(moved, devices, strict=True):
        tensor.data = tensor.data.to(device)


def _has_memory_of_its_own(tensor: Tensor, own: int) -> bool:
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == bytes_ > 0 and count_references((tensor,), 0)[1] == own
