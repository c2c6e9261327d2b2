"""Memory of a GPU: a separate pool for one purpose, and a move that brings long-lived tensors together.

torch's allocator returns memory by whole segments. Blocks of a pool do not fragment the memory of others. The
optimizer's state is created at the end of the first step, in gaps between freed activations, and so are gradients.
After one move they occupy only their own segments.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from volseg.device.gpus import empty_cache, fake_recording, get_tensor_device, has_values, on_gpu
from volseg.device.torch_internals import PLAIN_TENSORS, count_references


class MemoryPool:
    """A part of torch's allocator.

    Parameters
    ----------
    name : str
        Name of its purpose, for traces without a GPU.
    device : torch.device
        Device of the pool; a CPU has no separate pool.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Allocate from the pool in this thread."""
        if self._pool is not None:
            with torch.cuda.use_mem_pool(self._pool, self.device):
                yield
        elif not has_values(self.device):
            with fake_recording(self.name):
                yield
        else:
            yield


def move_together(tensors: Iterable[Tensor]) -> None:
    """Move tensors of one GPU to new memory through host memory, and release the freed segments.

    The tensors stay the same objects. Tensors that share memory with others (a view, a slice of a bucket) stay where
    they are, and so do tensors that are on no GPU.

    Parameters
    ----------
    tensors
        Tensors; duplicates are allowed.
    """
    own = count_references((torch.empty(1),), 0)[1]
    found = {id(tensor): tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS and on_gpu(tensor)}
    moved = [tensor for tensor in found.values() if _has_memory_of_its_own(tensor, own)]
    if not moved:
        return
    devices = [get_tensor_device(tensor) for tensor in moved]
    on_host = [tensor.detach().to("cpu", copy=True) for tensor in moved]
    for tensor, copy in zip(moved, on_host, strict=True):
        tensor.data = copy  # values exist in one place at any time
    empty_cache(devices[0])
    for tensor, device in zip(moved, devices, strict=True):
        tensor.data = tensor.data.to(device)


def _has_memory_of_its_own(tensor: Tensor, own: int) -> bool:
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == bytes_ > 0 and count_references((tensor,), 0)[1] == own
