"""Estimate the memory of a step: the memory that torch's allocator reserves, and the memory outside the allocator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from volseg.errors import OutOfMemoryError
from volseg.estimate.allocator import Allocator, has_expandable_segments
from volseg.estimate.trace import Allocate, Event, Free, KernelRun, Mark, Sent, StepTrace, Used

MORE_STEPS = 4
"""Steps that are appended to a trace that nearly fills the memory: a DynUNet at 800 x 160 x 160 in 16 GiB ran out of
memory in its third step."""

MIB = 2**20

# Memory of a GPU outside torch's allocator, measured on an H200 (``workflows/benchmarks/plan_accuracy.py``): the used
# memory that the device reports, less torch's reserved memory. Torch 2.11, CUDA 13, driver 580; another driver takes
# some tens of MiB more or less.

CONTEXT = 527 * MIB
"""CUDA's context, created with the first tensor; the driver takes 4 MiB of it before any process starts."""

LIBRARIES = 112 * MIB
"""cuDNN and the kernels that a step loads; the network and its kernels change this by some MiB only."""

MATRICES = 68 * MIB
"""cuBLAS, which the first product of matrices loads. Its workspace is a block of torch's allocator."""

STREAM = 70 * MIB
"""Memory of the first stream beside the default one: a recording's stream, or that of copies between GPUs."""

GROUP = 1250 * MIB
"""NCCL's communicators and the mailboxes of two processes; measured on two GPUs of one host."""

PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm"})


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peaks of one device, in bytes."""

    used: int
    """Allocated memory: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Reserved memory: ``torch.cuda.max_memory_reserved``."""
    outside: int
    """Memory outside torch's allocator: the context, workspaces of libraries."""
    peak_in: str
    """The part of the step in which ``reserved`` was highest."""
    reserved_by_steps: int | None = None
    """Reserved memory before the first validation; None if no validation is traced."""

    @property
    def total(self) -> int:
        """Memory that the device must have."""
        return self.reserved + self.outside

    def of_steps(self) -> "MemoryUse":
        """Return the peaks of the training steps, without the validation."""
        return self if self.reserved_by_steps is None else replace(self, reserved=self.reserved_by_steps)


def estimate_memory_use(trace: StepTrace, capacity: int, outside: int, margin: float, is_ahead: bool) -> MemoryUse:
    """Return the peaks of a trace; a step that nearly fills the memory may fit once torch frees its cache."""
    expands = has_expandable_segments()
    # Kernels and messages, which are most events, do not change the memory.
    asked = StepTrace(tuple(event for event in trace.events if not isinstance(event, KernelRun | Sent)), trace.device)
    free = compute_memory_use(asked, expands, outside=outside, is_ahead=is_ahead)
    safe = replace(free, reserved=int(margin * free.reserved))
    # Freeing the cache does not reduce the allocated memory.
    if safe.total <= capacity or free.used + outside > capacity:
        return safe
    events: Sequence[Event] = asked.events
    for _ in range(MORE_STEPS):  # torch frees its cache in every step, and finds other pieces each time
        events = repeat_last_step(events)
    try:
        more = StepTrace(tuple(events), trace.device)
        squeezed = compute_memory_use(more, expands, capacity, outside=outside, is_ahead=is_ahead)
    except OutOfMemoryError:
        return safe
    return replace(squeezed, reserved=min(safe.reserved, capacity - outside))


def compute_memory_use(
    trace: StepTrace, expands: bool = False, capacity: int | None = None, *, outside: int = 0, is_ahead: bool = False
) -> MemoryUse:
    """Return the peaks of a trace.

    Parameters
    ----------
    trace : StepTrace
        Events from the placing of the network on; blocks that are alive at the end of the trace stay allocated.
    expands : bool
        Whether the allocator has expandable segments; see `has_expandable_segments`.
    capacity : int, optional
        Bytes of the device; when they run out, cached memory is freed and the request is repeated, as torch does. By
        default the memory is unlimited.
    outside : int
        Bytes of the device outside the allocator.
    is_ahead : bool
        Whether Python finishes a step before the device does. Then a block that two streams use, as each copy between
        devices does, becomes free at the end of the step; otherwise it becomes free at once.

    Raises
    ------
    OutOfMemoryError
        If the capacity does not suffice; the message has the part of the step and the number of the event.
    """
    allocator = Allocator(expands, None if capacity is None else capacity - outside)
    part, peak_in, peak = "placing", "placing", 0
    by_steps: int | None = None
    shared: set[int] = set()
    for number, event in enumerate(trace.events):
        match event:
            case Allocate(block, size, stream, pool):
                try:
                    allocator.take(block, size, stream, pool)
                except OutOfMemoryError as fault:
                    raise OutOfMemoryError(f"out of memory in {part} (event {number} of the trace): {fault}") from fault
                if allocator.reserved > peak:
                    peak, peak_in = allocator.reserved, part
            case Used(block) if is_ahead:
                shared.add(block)
            case Free(block) if block in shared:
                allocator.leave(block)
            case Free(block):
                allocator.give_back(block)
            case Mark("empty_cache"):
                allocator.empty_cache()
            case Mark(name):
                if name == "end":
                    allocator.wait()
                part = name
                by_steps = allocator.peak_reserved if name == "validate" else by_steps
    return MemoryUse(
        used=allocator.peak_used,
        reserved=allocator.peak_reserved,
        outside=outside,
        peak_in=peak_in,
        reserved_by_steps=by_steps,
    )


def repeat_last_step(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of a device with the last step repeated once.

    A step frees some blocks of the step before it (mostly gradients), so the repeated step frees the same blocks of the
    last one. If sizes and order do not identify these blocks, the events are returned unchanged.
    """
    marks = {event.name: number for number, event in enumerate(events) if isinstance(event, Mark)}
    step = events[marks.get("step", 0) : marks.get("end", -1) + 1]
    taken = {event.block: replace(event, block=0) for event in events if isinstance(event, Allocate)}
    own = [event.block for event in step if isinstance(event, Allocate)]
    given_back = {event.block for event in step if isinstance(event, Free)}
    left = [block for block in own if block not in given_back]
    earlier = sorted(given_back.difference(own))  # numbers rise as blocks are taken
    if not step or [taken[block] for block in earlier] != [taken[block] for block in left]:
        return events
    first = max(taken, default=0) + 1
    numbers = {block: first + place for place, block in enumerate(own)}
    end, before = marks["end"] + 1, dict(zip(earlier, left, strict=True))
    return [*events[:end], *_rename(step, before | numbers), *_rename(events[end:], numbers)]


def _rename(events: Sequence[Event], numbers: Mapping[int, int]) -> list[Event]:
    """Return events with their blocks renumbered."""
    kinds = Allocate | Free | Used
    return [
        replace(each, block=numbers.get(each.block, each.block)) if isinstance(each, kinds) else each for each in events
    ]


def estimate_cuda_overhead(trace: StepTrace, processes: int = 1) -> int:
    """Return the bytes of a GPU that a step takes outside torch's allocator.

    Parameters
    ----------
    trace : StepTrace
        Trace of the step.
    processes : int
        Number of processes that share volumes or batches.
    """
    multiplies = any(isinstance(event, KernelRun) and event.name in PRODUCTS for event in trace.events)
    streams = any(isinstance(event, KernelRun | Allocate) and event.stream != 0 for event in trace.events)
    stream = STREAM if streams and processes == 1 else 0
    return estimate_least_cuda_overhead(processes) + (MATRICES if multiplies else 0) + stream


def estimate_least_cuda_overhead(processes: int = 1) -> int:
    """Return the bytes that every step takes outside torch's allocator."""
    return CONTEXT + LIBRARIES + (STREAM + GROUP if processes > 1 else 0)
