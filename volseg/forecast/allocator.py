"""How much memory a trace takes of its device: its requests, in order, through the model of torch's allocator."""

from volseg.errors import OutOfMemoryError
from volseg.forecast.allocator_settings import AllocatorSettings
from volseg.forecast.caching_allocator import Allocator
from volseg.forecast.memory_use import MemoryUse
from volseg.forecast.trace import Allocate, Free, LetGo, Mark, StepTrace

__all__ = ["AllocatorSettings", "find_memory_use"]


def find_memory_use(
    trace: StepTrace,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    *,
    outside: int = 0,
) -> MemoryUse:
    """Return the peaks of a trace.

    Parameters
    ----------
    trace : StepTrace
        From the placing of the network on; what lives at the end of the trace lives on.
    settings : AllocatorSettings, optional
        Torch's defaults by default.
    capacity : int, optional
        Bytes of the device; where they are not enough, cached memory is given back, as torch does, and asked for again.
        Without, the trace takes what it needs.
    outside : int
        Bytes of the device that are taken beside the allocator.

    Raises
    ------
    OutOfMemoryError
        Where the capacity does not suffice: with the part of the step and the number of the event.
    """
    allocator = Allocator(settings, None if capacity is None else capacity - outside)
    part, peak_in, peak = "placing", "placing", 0
    for number, event in enumerate(trace.events):
        match event:
            case Allocate(block, size, stream, pool):
                try:
                    allocator.take(block, size, stream, pool)
                except OutOfMemoryError as fault:
                    raise OutOfMemoryError(f"out of memory in {part} (event {number} of the trace): {fault}") from fault
                if allocator.reserved > peak:
                    peak, peak_in = allocator.reserved, part
            case Free(block):
                allocator.give_back(block)
            case LetGo(block):
                allocator.leave(block)
            case Mark("empty_cache"):
                allocator.empty_cache()
            case Mark(name):
                part = name
    return MemoryUse(used=allocator.peak_used, reserved=allocator.peak_reserved, outside=outside, peak_in=peak_in)
