"""Losses for display, from the first step on: they come from the device when they come, and nobody waits for them."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Glimpse"]

EVERY_SECONDS = 0.5
"""Between two copies: more could not be read, and each takes some ten microseconds of the host."""


class Glimpse:
    """The losses of one of the last batches, copied beside what a GPU computes; on a CPU they are there at once."""

    def __init__(self) -> None:
        self._next = 0.0
        self._on_the_way: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def exchange(self, losses: Mapping[str, Tensor]) -> dict[str, float] | None:
        """Take the losses of a batch; return those of a batch before that have arrived, or None.

        Parameters
        ----------
        losses : mapping
            Scalars by name, on the device, where later steps do not overwrite them.
        """
        if not any(value.is_cuda for value in losses.values()):
            return {name: float(value) for name, value in losses.items()}
        arrived = self._take()
        now = time.monotonic()
        if self._on_the_way is None and now >= self._next:
            self._next = now + EVERY_SECONDS
            self._send(losses)
        return arrived

    def _send(self, losses: Mapping[str, Tensor]) -> None:
        # One copy, into pinned memory: from pageable memory it would wait for the device.
        stacked = torch.stack([value.detach().float().reshape(()) for value in losses.values()])
        arriving = torch.empty(len(losses), pin_memory=True)
        arriving.copy_(stacked, non_blocking=True)
        event = torch.cuda.current_stream(stacked.device).record_event()
        self._on_the_way = list(losses), arriving, event

    def _take(self) -> dict[str, float] | None:
        if self._on_the_way is None:
            return None
        names, values, event = self._on_the_way
        if not event.query():
            return None
        self._on_the_way = None
        return dict(zip(names, values.tolist(), strict=True))
