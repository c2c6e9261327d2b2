"""Read a trace of torch's profiler (Chrome's trace format): each kernel with the layer that it ran for.

A number (``correlation``) links a GPU kernel to the call that started it. That call is inside of ranges on its thread:
of a module in forward, of an autograd node in backward, of the step. The innermost range gives the place::

    main      | (step) 0 -----------------------------------------------------------|
              |   stem ------|  down.0 -----|    loss           Optimizer.step ---|
    autograd                                  | node 11 --| node 10 --| node 7 --|
    launches      a    b        c    d          e            f   g       h          i
    GPU            a b        c   d               e  f g  h                           i

On a CPU, torch's outermost operators take the place of kernels.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from operator import attrgetter
from typing import Any

from volseg.errors import VolsegError
from volseg.profiling.kernels import AUGMENTATION, LOSS, MARK, OPTIMIZER, OUTSIDE, StepPlace, TimedKernel, travels

MICROSECOND = 1e-6
OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZING = "Optimizer."
NUMBER = "Sequence number"

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadKernel:
    """A kernel in a trace."""

    timed: TimedKernel
    grid: tuple[int, ...] = ()
    step: int | None = None
    """Number of the step that started the kernel; None between steps."""
    is_replayed: bool = False
    """Whether a graph replay started the kernel; its place is then that of the whole replay."""


# Which kernel of a replayed step is which of the same step run eagerly.
#
# A replay has the kernels of the step that was recorded and no Python, so no profiler knows for what each runs. It has
# other streams and another order between them than the eager step. So a kernel is found by what both tell of it, its
# name and its grid: where both steps have as many of a sort, the first is the first, the second the second::
#
#     eager     conv a   norm   conv a   copy   conv b
#     replay    conv a   copy   norm   conv a   memset   conv b
#                  1       1      1      2        -        1
#
# What is left (copies of inputs, which only a replay has; a kernel that a library chose anew) belongs where the
# matched kernel before it does that computes, and counts as not matched.


def match(replayed: Sequence[ReadKernel], eager: Sequence[ReadKernel]) -> tuple[list[StepPlace], float]:
    """Return the place of each replayed kernel, and the share of their time that was matched.

    Parameters
    ----------
    replayed
        Kernels of one step, in order of their begin.
    eager
        Kernels of the same step run eagerly, at their places, in order of their begin.
    """
    found: dict[int, int] = {}
    for find_sort in (attrgetter("timed.name", "grid", "timed.device"), attrgetter("timed.name", "timed.device")):
        taken = set(found.values())
        own = _group((number, find_sort(kernel)) for number, kernel in enumerate(replayed) if number not in found)
        others = _group((number, find_sort(kernel)) for number, kernel in enumerate(eager) if number not in taken)
        for sort, numbers in own.items():
            if len(numbers) == len(others.get(sort, ())):
                found.update(zip(numbers, others[sort], strict=True))
    total = fsum(kernel.timed.seconds for kernel in replayed)
    matched = fsum(replayed[number].timed.seconds for number in found)
    places, before = [], StepPlace(OUTSIDE, "other")
    for number in range(len(replayed)):
        place = eager[found[number]].timed.place if number in found else before
        before = place if place.direction != "communication" else before
        places.append(place)
    return places, matched / total if total else 1.0


def _group(sorts: Iterable[tuple[int, Hashable]]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, sort in sorts:
        found[sort].append(number)
    return found


def read_trace(events: Iterable[Event], name_layer: Callable[[int], str]) -> list[ReadKernel]:
    """Return the kernels of a trace, in order of their begin; without a GPU the operators.

    Parameters
    ----------
    events
        ``traceEvents`` of the file.
    name_layer
        Returns the layer that created the autograd node of a number; see ``PlaceWatch``.

    Raises
    ------
    VolsegError
        If the trace marks no step, or nothing ran.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    # Times since the machine's start are large: differences of such numbers lose precision.
    origin = min((event["ts"] for event in whole), default=0.0)
    whole = [{**event, "ts": event["ts"] - origin} for event in whole]
    begin = f"{MARK}{OUTSIDE} "
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(begin)))
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"].startswith(begin)
    )
    if not steps:
        raise VolsegError(f"the trace holds no range named {MARK}{OUTSIDE} N, so no step is known in it")
    kernels = [event for event in whole if event.get("cat") in OF_GPU]
    threads = _Threads(whole, steps, name_layer)
    found = _read_gpu(kernels, whole, threads) if kernels else threads.list_operators()
    if not found:
        raise VolsegError(f"the trace holds {len(whole)} ranges, but neither a kernel nor an operator")
    return sorted(found, key=lambda kernel: kernel.timed.start)


def replace_replayed(kernels: Sequence[ReadKernel], eager: Sequence[ReadKernel]) -> tuple[list[ReadKernel], float]:
    """Return kernels with the places of the same kernels of an eager step, and the matched share of their time.

    Parameters
    ----------
    kernels
        Kernels of replayed steps, or of steps without marked layers.
    eager
        Kernels of a step with marked layers.
    """
    reference = [kernel for kernel in eager if _is_of_step(kernel)]
    by_step: dict[int, list[ReadKernel]] = defaultdict(list)
    found = []
    for kernel in kernels:
        if _is_of_step(kernel):
            assert kernel.step is not None
            by_step[kernel.step].append(kernel)
        else:
            found.append(kernel)
    matched = total = 0.0
    for own in by_step.values():
        places, part = match(own, reference)
        seconds = sum(kernel.timed.seconds for kernel in own)
        matched, total = matched + part * seconds, total + seconds
        found += [
            replace(kernel, timed=replace(kernel.timed, place=_travelling(kernel.timed.name, place, alone=True)))
            for kernel, place in zip(own, places, strict=True)
        ]
    return sorted(found, key=lambda kernel: kernel.timed.start), matched / total if total else 1.0


def _is_of_step(kernel: ReadKernel) -> bool:
    return kernel.step is not None and kernel.timed.place.direction != "augmentation"


def _travelling(name: str, place: StepPlace, *, alone: bool) -> StepPlace:
    return StepPlace(place.layer, "communication") if travels(name, alone=alone) else place


def _time(event: Event, place: StepPlace, *, alone: bool, **where: int) -> TimedKernel:
    """Return the kernel of an event that ran for a place."""
    return TimedKernel(
        name=event["name"],
        place=_travelling(event["name"], place, alone=alone),
        start=event["ts"] * MICROSECOND,
        seconds=event["dur"] * MICROSECOND,
        **where,
    )


def _read_gpu(kernels: Sequence[Event], events: Iterable[Event], threads: "_Threads") -> list[ReadKernel]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    found, alone = [], not any(travels(event["name"]) for event in kernels)
    for event in kernels:
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        place, step = StepPlace(OUTSIDE, "other"), None
        if launch is not None:
            place, step = threads.find_place(launch["tid"], launch["ts"])
        timed = _time(event, place, alone=alone, **{key: int(args.get(key, 0)) for key in ("device", "stream")})
        is_replayed = launch is not None and "GraphLaunch" in launch["name"]
        found.append(ReadKernel(timed=timed, grid=tuple(args.get("grid", ())), step=step, is_replayed=is_replayed))
    return found


class _Threads:
    """Find the ranges around a moment of a thread."""

    def __init__(
        self, events: Iterable[Event], steps: Sequence[tuple[float, float, int]], name_layer: Callable[[int], str]
    ) -> None:
        self._steps = steps
        self._name_layer = name_layer
        self._by_thread: dict[Any, list[Event]] = defaultdict(list)
        self._begins_forward, self._begins_backward, self._ends_backward = [], [], []
        for event in events:
            if event.get("cat") not in ("user_annotation", "cpu_op"):
                continue
            self._by_thread[event["tid"]].append(event)
            if event["name"].startswith(BACKWARD):
                self._begins_backward.append(event["ts"])
                self._ends_backward.append(event["ts"] + event["dur"])
            elif event["name"].startswith(MARK) and not event["name"].startswith(f"{MARK}("):
                self._begins_forward.append(event["ts"])
        for own in self._by_thread.values():
            own.sort(key=lambda event: (event["ts"], -event["dur"]))
        self._begins = {thread: [event["ts"] for event in own] for thread, own in self._by_thread.items()}
        self._around = {thread: _find_around(own) for thread, own in self._by_thread.items()}

    def find_place(self, thread: Any, moment: float) -> tuple[StepPlace, int | None]:
        """Return the place of a kernel that starts at a moment, and the step."""
        number = bisect_right(self._begins.get(thread, []), moment) - 1
        return self._judge(thread, self._list_ranges(thread, number, moment), moment)

    def list_operators(self) -> list[ReadKernel]:
        """Return torch's outermost operators as kernels of the CPU."""
        found = []
        for thread, own in self._by_thread.items():
            for number, event in enumerate(own):
                ranges = self._list_ranges(thread, number, event["ts"])
                if not _is_operator(event) or any(_is_operator(other) for other in ranges if other is not event):
                    continue
                place, step = self._judge(thread, ranges, event["ts"])
                found.append(ReadKernel(timed=_time(event, place, alone=True), step=step))
        return found

    def _list_ranges(self, thread: Any, number: int, moment: float) -> list[Event]:
        """Return the ranges around a moment, the innermost first; ``number`` is the last to begin before it."""
        found, own, around = [], self._by_thread[thread], self._around.get(thread, [])
        while number >= 0:
            event = own[number]
            if event["ts"] + event["dur"] >= moment:
                found.append(event)
            number = around[number]
        return found

    def _judge(self, thread: Any, ranges: Sequence[Event], moment: float) -> tuple[StepPlace, int | None]:
        step = next((number for begin, end, number in self._steps if begin <= moment <= end), None)
        backward = next((event for event in ranges if event["name"].startswith(BACKWARD)), None)
        mark = next((event for event in ranges if event["name"].startswith(MARK)), None)
        layer = "" if mark is None else mark["name"].removeprefix(MARK)
        if mark is not None and not layer.startswith(f"{OUTSIDE} "):  # the step itself
            if layer == AUGMENTATION:
                return StepPlace(AUGMENTATION, "augmentation"), step
            within = backward is not None and ranges.index(mark) < ranges.index(backward)
            return StepPlace(layer, "recompute" if within else "forward"), step
        if backward is not None:
            return StepPlace(self._name_node(thread, backward), "backward"), step
        if any(event["name"].startswith(OPTIMIZING) for event in ranges):
            return StepPlace(OPTIMIZER, "optimizer"), step
        return self._judge_by_time(moment, step), step

    def _name_node(self, thread: Any, event: Event) -> str:
        """Return the layer of a node; without a number (gradient accumulation), that of the previous node."""
        own = self._by_thread[thread]
        number = bisect_right(self._begins[thread], event["ts"]) - 1
        while number >= 0:
            sequence = own[number].get("args", {}).get(NUMBER)
            if own[number]["name"].startswith(BACKWARD) and isinstance(sequence, int) and 0 <= sequence < 2**62:
                return self._name_layer(sequence)
            number -= 1
        return OUTSIDE

    def _judge_by_time(self, moment: float, step: int | None) -> StepPlace:
        """Return the place of a kernel outside of ranges: before the network, in the loss, or after backward."""
        if step is None:
            return StepPlace(OUTSIDE, "other")
        begin, end, _ = next(each for each in self._steps if each[2] == step)
        forward = [each for each in self._begins_forward if begin <= each <= end]
        backward = [each for each in self._begins_backward if begin <= each <= end]
        if backward and moment >= min(backward):
            is_over = moment >= max(each for each in self._ends_backward if begin <= each <= end)
            return StepPlace(OPTIMIZER, "optimizer") if is_over else StepPlace(OUTSIDE, "backward")
        return StepPlace(LOSS, "forward") if forward and moment >= min(forward) else StepPlace(OUTSIDE, "other")


def _find_around(events: Sequence[Event]) -> list[int]:
    """Return for each range of a thread the number of its enclosing range, or -1."""
    found, open_ranges = [], list[int]()
    for number, event in enumerate(events):
        while open_ranges and events[open_ranges[-1]]["ts"] + events[open_ranges[-1]]["dur"] <= event["ts"]:
            open_ranges.pop()
        found.append(open_ranges[-1] if open_ranges else -1)
        open_ranges.append(number)
    return found


def _is_operator(event: Event) -> bool:
    """Return whether a range is a torch operator, and not an autograd node around one."""
    name = event["name"]
    return event.get("cat") == "cpu_op" and "::" in name and not name.startswith(("autograd::", "torch::autograd"))
