"""The model of torch's allocator beside a step that is followed: where it runs out of memory the step need not go on.

What tensors hold may fit where what torch keeps for them does not. The same requests in the same order come to the same
end, whatever would follow them; so a step that runs out of memory on the way has run out of it.
"""

from collections.abc import Sequence

from volseg.errors import OutOfMemoryError
from volseg.forecast.allocator import AllocatorSettings, find_memory_use
from volseg.forecast.caching_allocator import Allocator
from volseg.forecast.outside import MATRICES, STREAM
from volseg.forecast.trace import Allocate, Event, Free, Mark, StepTrace

__all__ = ["EarlyEnd"]

LATER = (MATRICES, STREAM, MATRICES + STREAM)
"""Bytes beside the allocator that the rest of a step may turn out to take."""


class EarlyEnd:
    """Says when the requests of a device cannot be met.

    Parameters
    ----------
    capacity : int
        Bytes that the allocator can have at most.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._settings = AllocatorSettings.find()
        self._allocator: Allocator | None = Allocator(self._settings, capacity)

    def is_reached(self, events: Sequence[Event]) -> bool:
        """Tell of the last event; say whether there was too little memory, whatever comes behind it.

        Parameters
        ----------
        events : sequence of Event
            Of the device, so far.
        """
        event, allocator = events[-1], self._allocator
        if allocator is None:
            return False
        if isinstance(event, Allocate):
            try:
                allocator.take(event.block, event.size, event.stream, event.pool)
            except OutOfMemoryError:
                self._allocator = None  # once is enough
                return not any(self._fits(events, later) for later in LATER)
        elif isinstance(event, Free):
            allocator.give_back(event.block)
        elif event == Mark("empty_cache"):
            allocator.empty_cache()
        elif event in (Mark("record"), Mark("validate")):
            # What is not recorded after all is followed anew; with a validation no step is repeated.
            self._allocator = None
        return False

    def _fits(self, events: Sequence[Event], later: int) -> bool:
        """Say whether the same requests would be met with less memory, which gives other pieces back earlier."""
        try:
            find_memory_use(StepTrace(tuple(events)), self._settings, self._capacity, outside=later)
        except OutOfMemoryError:
            return False
        return True
