# ruff: noqa: N803  (upper case: what Triton is compiled for)
# mypy: disable-error-code="no-untyped-def"
"""A few kilobytes from every GPU to every GPU of a host in one kernel: the norms' statistics, dozens of times a step.

Every process writes its values into the memory of all the others, each beside the number of the call in one word of 64
bits, and waits until all words of its own memory have that number. Nothing has to be fenced, since such a word arrives
whole (NCCL's LL protocol). NCCL's all-gather does the same later, and queues behind the gradients' sums. ::

    box   | words of even calls, per sender | of odd calls |

Two sets of words are enough: who writes those of call ``n + 2`` has those of call ``n + 1``, and each sender had read
call ``n`` before it sent them. What travels is read in the order of the grid, so sums agree bit for bit.
"""

import logging
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device import triton_tiles
from volseg.device.peer.memory import map_together
from volseg.device.triton_tiles import select_device, tl, triton

__all__ = ["CAPACITY", "PATIENCE", "Mailbox", "mailbox"]

logger = logging.getLogger(__name__)

CAPACITY = 8192
"""Float32 values that one process sends at most: 2 statistics of 16 samples and 256 channels."""

PATIENCE = 2**30
"""Looks at words that do not come before the result is NaN: some ten minutes, NCCL's default, whatever timeout the
group has. A process that is later than that, or has gone, so shows in the loss, which the training loop refuses."""

if triton is not None:

    @triton.jit
    def put(value, i, mask, boxes, call, rank, SHARDS: tl.constexpr, CAPACITY: tl.constexpr):
        """Write float32 values to the places ``i`` of this process in everybody's box."""
        word = (call << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        start = ((call & 1) * SHARDS + rank) * CAPACITY
        for peer in tl.static_range(SHARDS):
            tl.store(tl.load(boxes + peer).to(tl.pointer_type(tl.int64)) + start + i, word, mask=mask)

    @triton.jit
    def get(i, mask, boxes, call, rank, peer, patience, SHARDS: tl.constexpr, CAPACITY: tl.constexpr):
        """Wait for the values at the places ``i`` of a process; NaN where they do not come."""
        start = ((call & 1) * SHARDS + peer) * CAPACITY
        place = tl.load(boxes + rank).to(tl.pointer_type(tl.int64)) + start + i
        word = tl.load(place, mask=mask, other=0, volatile=True)
        looks = 0
        while (tl.max(((word >> 32 != call) & mask).to(tl.int32), 0) != 0) & (looks < patience):
            word = tl.load(place, mask=mask, other=0, volatile=True)
            looks += 1
        value = word.to(tl.int32).to(tl.float32, bitcast=True)
        return tl.where(word >> 32 == call, value, float("nan"))

    @triton.jit
    def count(calls, call):
        """Count the call, once all programs of the kernel have come here."""
        tl.debug_barrier()
        if tl.atomic_add(calls + 1, 1) == tl.num_programs(0) - 1:
            tl.store(calls + 1, 0)
            tl.store(calls, call.to(tl.int32))

    @triton.jit(do_not_specialize=["n", "rank", "patience"])
    def _exchange_kernel(
        own, out, boxes, calls, n, rank, patience, SHARDS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        call = (tl.load(calls) + 1).to(tl.int64)
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        put(tl.load(own + i, mask=mask, other=0.0), i, mask, boxes, call, rank, SHARDS, CAPACITY)
        tl.debug_barrier()  # nothing that is sent may wait for what is awaited
        for peer in tl.static_range(SHARDS):
            value = get(i, mask, boxes, call, rank, peer, patience, SHARDS, CAPACITY)
            tl.store(out + peer * n + i, value, mask=mask)
        count(calls, call)


class Mailbox:
    """One process's side of the exchange.

    Parameters
    ----------
    boxes
        Address, in this process, of the box of every process in the order of the group.
    rank
        This process's number in the group.
    device
        Its GPU.
    patience
        Looks at words that do not come before the result is NaN.

    Notes
    -----
    Calls are made in the same order by all, on streams that wait for one another; also from a CUDA graph.
    """

    def __init__(self, boxes: list[int], rank: int, device: torch.device, patience: int = PATIENCE) -> None:
        self.rank, self.shards, self.patience = rank, len(boxes), patience
        self.boxes = torch.tensor(boxes, dtype=torch.int64, device=device)
        # The calls so far, and the programs of the present one that are done.
        self.calls = torch.zeros(2, dtype=torch.int32, device=device)

    @staticmethod
    def size(shards: int) -> int:
        """Return the bytes of a box."""
        return 2 * shards * CAPACITY * 8

    @staticmethod
    def takes(partial: Tensor) -> bool:
        """Say whether the tensor can be sent."""
        return partial.dtype == torch.float32 and 0 < partial.numel() <= CAPACITY

    def told(self) -> dict[str, Any]:
        """Return the keywords of a kernel that uses ``put``, ``get`` and ``count``."""
        return {
            "boxes": self.boxes,
            "calls": self.calls,
            "rank": self.rank,
            "patience": self.patience,
            "SHARDS": self.shards,
            "CAPACITY": CAPACITY,
        }

    def stack(self, partial: Tensor) -> Tensor:
        """Return every process's tensor, ``(shards, ...)``; NaN where one has not come."""
        partial = partial.contiguous()
        out = partial.new_empty((self.shards, *partial.shape))
        with select_device(partial):
            _exchange_kernel[(triton.cdiv(partial.numel(), 512),)](
                partial, out, n=partial.numel(), **self.told(), BLOCK=512, num_warps=4,
            )  # fmt: skip
        return out


@cache  # one per group: its memory stays for as long as the process lives
def mailbox(group: dist.ProcessGroup, device: torch.device) -> Mailbox | None:
    """Return the group's mailbox, or None where there can be none; called by all processes of the group."""
    shards = dist.get_world_size(group)
    if device.type != "cuda" or not triton_tiles.available():
        return None
    with torch.cuda.device(device):
        boxes = map_together(group, device, Mailbox.size(shards))
        if boxes is None:
            return None
        found = Mailbox(boxes, dist.get_rank(group), device, patience=0)
        own = torch.full((1,), float(found.rank), device=device)
        found.stack(own)  # compiles, and waits for nobody
        reached = [False] * shards
        dist.all_gather_object(reached, True, group=group)
        # Once, with an end: what can be mapped might still not be reached.
        found.patience = 2**22
        numbers = found.stack(own)
        found.patience = PATIENCE
        dist.all_gather_object(reached, numbers.flatten().tolist() == list(range(shards)), group=group)
    if not all(reached):
        logger.info("GPUs exchange statistics through NCCL: what they write does not reach the others' memory")
        return None
    return found
