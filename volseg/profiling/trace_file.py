"""Read a trace of torch's profiler (Chrome's trace format): each kernel with the layer that it ran for.

A number (``correlation``) links a GPU kernel to the call that started it. That call is inside ranges on its thread: of
a module in forward, of an autograd node in backward, of the step. The innermost range gives the place::

    main      | (step) 0 -----------------------------------------------------------|
              |   stem ------|  down.0 -----|    loss           Optimizer.step ---|
    autograd                                  | node 11 --| node 10 --| node 7 --|
    launches      a    b        c    d          e            f   g       h          i
    GPU            a b        c   d               e  f g  h                           i

On a CPU, torch's outermost operators take the place of kernels.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from operator import attrgetter
from typing import Any

from volseg.errors import VolsegError
from volseg.profiling.kernels import AUGMENTATION, LOSS, MARK, OPTIMIZER, OUTSIDE, StepPlace, TimedKernel, travels

MICROSECOND = 1e-6
OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
RANGES = ("user_annotation", "cpu_op")
STEP = f"{MARK}{OUTSIDE} "
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZING = "Optimizer."
NUMBER = "Sequence number"

Event = Mapping[str, Any]

At = tuple[StepPlace, int | None]
"""Place and number of the step; None between steps."""

NOWHERE: At = StepPlace(OUTSIDE, "other"), None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadKernel:
    """A kernel in a trace."""

    timed: TimedKernel
    grid: tuple[int, ...] = ()
    step: int | None = None
    """Number of the step that started the kernel; None between steps."""


# Match the kernels of a replayed step with those of the same step run eagerly.
#
# A replay has the kernels of the recorded step but no Python, so a profiler cannot tell the layer of a kernel. Its
# streams, and the order between them, differ from the eager step. Kernels are therefore matched by name and grid: if
# both steps have equally many with a name and grid, the first matches the first, the second the second::
#
#     eager     conv a   norm   conv a   copy   conv b
#     replay    conv a   copy   norm   conv a   memset   conv b
#                  1       1      1      2        -        1
#
# Other kernels (copies of inputs, which only a replay has; a kernel that a library chose differently) get the place of
# the computing kernel matched before them, and count as not matched.


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
    """Return the kernels of a trace in order of their start; without a GPU, the operators.

    Parameters
    ----------
    events
        ``traceEvents`` of the file.
    name_layer
        Returns the layer that created the autograd node with a number; see ``PlaceWatch``.

    Raises
    ------
    VolsegError
        If the trace has no marked step, or nothing ran.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    # Times since the machine's start are large: their differences would lose precision.
    origin = min((event["ts"] for event in whole), default=0.0)
    whole = [{**event, "ts": event["ts"] - origin} for event in whole]
    steps = _list_steps(whole)
    if not steps:
        raise VolsegError(f"the trace has no range named {STEP}N, so its steps are unknown")
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in whole:
        if event.get("cat") in (*RANGES, *LAUNCHES):
            threads[event["tid"]].append(event)
    nested = [each for own in threads.values() for each in _place_events(own, steps, name_layer)]
    kernels = [event for event in whole if event.get("cat") in OF_GPU]
    if kernels:
        launches = {event.get("args", {}).get("correlation"): at for event, _, at in nested if _is_launch(event)}
        placed = [(event, launches.get(event.get("args", {}).get("correlation"), NOWHERE)) for event in kernels]
    else:
        placed = [
            (event, at) for event, around, at in nested if _is_operator(event) and not any(map(_is_operator, around))
        ]
    if not placed:
        raise VolsegError(f"the trace has {len(whole)} ranges, but neither a kernel nor an operator")
    alone = not any(travels(event["name"]) for event, _ in placed)
    found = [_read_kernel(event, *at, alone=alone) for event, at in placed]
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


def _read_kernel(event: Event, place: StepPlace, step: int | None, *, alone: bool) -> ReadKernel:
    args = event.get("args", {})
    timed = TimedKernel(
        name=event["name"],
        place=_travelling(event["name"], place, alone=alone),
        start=event["ts"] * MICROSECOND,
        seconds=event["dur"] * MICROSECOND,
        device=int(args.get("device", 0)),
        stream=int(args.get("stream", 0)),
    )
    return ReadKernel(timed=timed, grid=tuple(args.get("grid", ())), step=step)


@dataclass(frozen=True)
class _TracedStep:
    """Moments of a step in a trace; infinite if they do not occur."""

    number: int
    begin: float
    end: float
    forward: float
    backward: float
    backward_end: float

    def find_place(self, moment: float) -> StepPlace:
        """Return the place of a kernel outside all ranges: before the network, in the loss, or after backward."""
        if moment >= self.backward_end:
            return StepPlace(OPTIMIZER, "optimizer")
        if moment >= self.backward:
            return StepPlace(OUTSIDE, "backward")
        return StepPlace(LOSS, "forward") if moment >= self.forward else StepPlace(OUTSIDE, "other")


def _list_steps(events: Sequence[Event]) -> list[_TracedStep]:
    nodes = [event for event in events if event["name"].startswith(BACKWARD)]
    layers = [event for event in events if event["name"].startswith(MARK) and event.get("cat") in RANGES]
    found = []
    for step in [event for event in layers if event["name"].startswith(STEP)]:
        begin, end = step["ts"], _get_end(step)
        forward = [
            event["ts"] for event in layers if begin <= event["ts"] <= end and not event["name"].startswith(f"{MARK}(")
        ]
        backward = [node for node in nodes if begin <= node["ts"] <= end]
        found.append(
            _TracedStep(
                number=int(step["name"].removeprefix(STEP)),
                begin=begin,
                end=end,
                forward=min(forward, default=inf),
                backward=min((node["ts"] for node in backward), default=inf),
                backward_end=max(map(_get_end, backward), default=inf),
            )
        )
    return found


def _place_events(
    events: Sequence[Event], steps: Sequence[_TracedStep], name_layer: Callable[[int], str]
) -> Iterator[tuple[Event, list[Event], At]]:
    """Yield the events of a thread in order, with the ranges around them, the innermost first, and their place."""
    opened: list[Event] = []
    node_layer, layers = OUTSIDE, dict[int, str]()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        moment = event["ts"]
        opened = [other for other in opened if _get_end(other) > moment]
        if event["name"].startswith(BACKWARD):
            # A node that accumulates a gradient has no number: it belongs to the node before it.
            sequence = event.get("args", {}).get(NUMBER)
            node_layer = name_layer(sequence) if isinstance(sequence, int) and 0 <= sequence < 2**62 else node_layer
            layers[id(event)] = node_layer
        around = opened[::-1]
        if event.get("cat") in RANGES:
            opened.append(event)
        step = next((step for step in steps if step.begin <= moment <= step.end), None)
        within = next((layers[id(other)] for other in reversed(opened) if id(other) in layers), OUTSIDE)
        place = _find_place([other["name"] for other in reversed(opened)], moment, step, within)
        yield event, around, (place, None if step is None else step.number)


def _find_place(names: Sequence[str], moment: float, step: _TracedStep | None, node_layer: str) -> StepPlace:
    """Return the place of an event inside ranges with these names, the innermost first."""
    nodes = [number for number, name in enumerate(names) if name.startswith(BACKWARD)]
    marks = [number for number, name in enumerate(names) if name.startswith(MARK) and not name.startswith(STEP)]
    if marks:
        layer = names[marks[0]].removeprefix(MARK)
        if layer == AUGMENTATION:
            return StepPlace(AUGMENTATION, "augmentation")
        return StepPlace(layer, "recompute" if nodes and marks[0] < nodes[0] else "forward")
    if nodes:
        return StepPlace(node_layer, "backward")
    if any(name.startswith(OPTIMIZING) for name in names):
        return StepPlace(OPTIMIZER, "optimizer")
    return NOWHERE[0] if step is None else step.find_place(moment)


def _get_end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def _is_launch(event: Event) -> bool:
    return event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})


def _is_operator(event: Event) -> bool:
    """Return whether a range is a torch operator, and not an autograd node around one."""
    name = event["name"]
    return event.get("cat") == "cpu_op" and "::" in name and not name.startswith(("autograd::", "torch::autograd"))
