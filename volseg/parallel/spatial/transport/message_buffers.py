"""Exchange planes between processes, by messages with reused memory.

NCCL marks the memory of a message as used on its stream. Freed memory of this kind is reused only after the host has
seen NCCL's end. Python runs steps ahead of the GPU, so copies would accumulate and fragment the memory around them: a
step took up to a third more than its tensors needed, and never twice the same amount. So this memory is not freed: a
reader lets its stream wait for NCCL, and the next message of that stream reuses the memory.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.gpus import MemoryPool, current_gpu_stream, is_gpu

FEWEST_BYTES = 512


class MessageBuffers:
    """Memory of messages on one GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A separate pool: these blocks stay, and would prevent larger blocks from being merged.
        self._pool = MemoryPool("messages", device)
        self._free: dict[tuple[int, int], list[Tensor]] = {}
        """Free blocks by size and stream."""

    def lend(self, size: int) -> Tensor:
        """Return at least this many bytes that no message uses."""
        size = _round_up(size)
        free = self._free.get(self._find_key(size))
        if free:
            memory = free.pop()
        else:
            with self._pool.in_use():
                memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        return memory

    def take_back(self, lent: Iterable[Tensor]) -> None:
        """Take memory back, after the current stream was made to wait for the messages."""
        for memory in lent:
            self._free.setdefault(self._find_key(memory.numel()), []).append(memory)

    def _find_key(self, size: int) -> tuple[int, int]:
        if not is_gpu(self.device):
            return size, 0
        stream = current_gpu_stream(self.device)
        return size, getattr(stream, "cuda_stream", 0) or getattr(stream, "number", 0)


class Messages:
    """Messages of one exchange, with their memory from the start until the wait.

    Parameters
    ----------
    device : torch.device
        Device of their memory.
    buffers : MessageBuffers, optional
        Memory for them. None on CPUs, and while a CUDA graph is recorded, which has its own memory.
    group, get_process_rank
        The processes (None for all of them), and the global rank of the one at a position.
    """

    def __init__(
        self,
        device: torch.device,
        buffers: MessageBuffers | None,
        group: dist.ProcessGroup | None,
        get_process_rank: Callable[[int], int],
    ) -> None:
        self.device, self.buffers, self._group, self._find_rank = device, buffers, group, get_process_rank
        self._lent: list[Tensor] = []
        self._operations: list[dist.P2POp] = []

    def pack(self, planes: Tensor) -> Tensor:
        """Return planes in sending order: one after another, and on a GPU in memory of their own."""
        if not is_gpu(self.device):
            return planes.contiguous()
        return self.make_room(planes.shape, planes.dtype).copy_(planes)

    def make_room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return dense memory for received planes."""
        if self.buffers is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        size = prod(shape) * dtype.itemsize
        self._lent.append(self.buffers.lend(size))
        return self._lent[-1][:size].view(dtype).view(tuple(shape))

    def send(self, planes: Tensor, position: int) -> None:
        """Add planes to send to a process."""
        self._note(dist.isend, self.pack(planes), position)

    def receive(self, planes: Tensor, position: int) -> Tensor:
        """Add memory for planes of a process, and return it."""
        self._note(dist.irecv, planes, position)
        return planes

    def _note(self, kind: Callable, planes: Tensor, position: int) -> None:
        self._operations.append(dist.P2POp(kind, planes, self._find_rank(position), self._group))

    def start(self) -> Callable[[], None]:
        """Start the exchange; return the function that waits."""
        work = dist.batch_isend_irecv(self._operations) if self._operations else []

        def wait() -> None:
            for request in work:
                request.wait()

        return wait

    def end(self) -> None:
        """Free the memory for later messages: the current stream has waited, and the received planes were read."""
        self._operations.clear()
        if self.buffers is not None:
            self.buffers.take_back(self._lent)
        self._lent.clear()


def _round_up(size: int) -> int:
    """Return one of four sizes between a power of two and the next: messages of many shapes share a few sizes."""
    step = max(FEWEST_BYTES, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step
