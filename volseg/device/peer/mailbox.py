"""One process's side of an exchange through memory that the GPUs of a host write directly."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from volseg.device import triton_tiles
from volseg.device.gpus import has_values, is_gpu, is_recording
from volseg.device.peer.memory import share_memory
from volseg.errors import ParallelError

logger = logging.getLogger(__name__)

PATIENCE = 2**30
"""Number of reads of a missing word before the result is NaN: some ten minutes, NCCL's default, for any timeout of the
group. A process that is later, or has died, so shows in the loss, which the training loop refuses."""

PROBE = 2**22
"""Number of reads in the first exchange, which must end: mapped memory may still be out of reach."""


class Mailbox(ABC):
    """One process's side of the exchange.

    Parameters
    ----------
    boxes
        Addresses, in this process, of the boxes of all processes in the order of the group.
    rank
        This process's number in the group.
    device
        GPU of this process.
    patience
        Number of reads of a missing word before the result is NaN.
    memory
        Memory of the boxes, held as long as the mailbox.

    Notes
    -----
    All processes make calls in the same order, on streams that wait for each other, also in a CUDA graph; the mailbox
    must be held for the graph's replays.
    """

    CARRIES: ClassVar[str]

    def __init__(
        self, boxes: Sequence[int], rank: int, device: torch.device, patience: int = PATIENCE, memory: Any = None
    ) -> None:
        self.rank, self.shards, self.patience, self.memory = rank, len(boxes), patience, memory
        # The number of calls so far, and of finished programs of the current call.
        self.calls = torch.zeros(2, dtype=torch.int32, device=device)

    @staticmethod
    @abstractmethod
    def size(shards: int) -> int:
        """Return the bytes of a box."""

    @abstractmethod
    def probe(self) -> bool:
        """Exchange a few values; return whether those of all processes arrived."""

    @classmethod
    def connect(cls, group: dist.ProcessGroup, device: torch.device) -> Self | None:
        """Return a mailbox of the group, or None if it is impossible; called by all processes of the group.

        Raises
        ------
        ParallelError
            While a CUDA graph is recorded: it cannot contain the wait for other processes.
        """
        shards = dist.get_world_size(group)
        if not is_gpu(device) or shards == 1 or not triton_tiles.available():
            return None
        if is_recording(device):
            raise ParallelError(
                "the first exchange between processes came while a CUDA graph was being recorded; run the step once "
                "before it is recorded"
            )
        if not has_values(device):
            return cls([0] * shards, dist.get_rank(group), device)
        with torch.cuda.device(device):
            memory = share_memory(group, device, cls.size(shards))
            if memory is None:
                return None
            found = cls(memory.addresses, memory.rank, device, patience=0, memory=memory)
            found.probe()  # compiles, and waits for no other process
            reached = [True] * shards
            dist.all_gather_object(reached, True, group=group)
            found.patience = PROBE
            came = found.probe()
            found.patience = PATIENCE
            dist.all_gather_object(reached, came, group=group)
        if not all(reached):
            logger.info("GPUs exchange %s through NCCL: what they write does not reach the others' memory", cls.CARRIES)
            return None
        return found
