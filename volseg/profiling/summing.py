"""Sum kernels and their work by layer, direction and kind: pure arithmetic."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from volseg.profiling.kernels import PlacedWork, StepPlace, TimedKernel, find_kind
from volseg.profiling.report import DevicePeaks, DeviceTimes, KindRow, LayerRow


def as_kernels(work: Iterable[PlacedWork]) -> list[TimedKernel]:
    """Return estimated work as consecutive kernels with their forecast durations."""
    found, ends = [], defaultdict[int, float](float)
    for each in work:
        begin, seconds = ends[each.device], each.forecast or 0.0
        ends[each.device] = begin + seconds
        found.append(TimedKernel(name=each.name, place=each.place, start=begin, seconds=seconds, device=each.device))
    return found


def sum_device_times(
    kernels: Iterable[TimedKernel], *, device: int, step: float, steps: int = 1, exposed: float | None = None
) -> DeviceTimes:
    """Return the times in which a device computes, sends and waits in a step.

    Parameters
    ----------
    kernels
        All kernels while the steps were watched; those of other devices are ignored.
    device
        Number of the device.
    step
        Seconds of one step without a profiler; raised to the total of its kernels if these take longer.
    steps
        Number of watched steps.
    exposed
        Seconds of exposed communication in a step, if known from another source than the kernels' times.
    """
    own = [kernel for kernel in kernels if kernel.device == device]
    computing = [(kernel.start, kernel.end) for kernel in own if not _sends(kernel)]
    sending = [(kernel.start, kernel.end) for kernel in own if _sends(kernel)]
    seconds = measure(computing) / steps
    communicating = sum(end - begin for begin, end in sending) / steps
    if exposed is None:
        exposed = measure([*computing, *sending]) / steps - seconds
    exposed = min(max(0.0, exposed), communicating)
    step = max(step, seconds + exposed)
    return DeviceTimes(
        device=device,
        computing=seconds,
        communicating=communicating,
        hidden=communicating - exposed,
        exposed=exposed,
        waiting=max(0.0, step - seconds - exposed),
        step=step,
    )


def _sends(kernel: TimedKernel) -> bool:
    return kernel.place.direction == "communication"


def sum_layers(
    kernels: Sequence[TimedKernel],
    work: Sequence[PlacedWork],
    *,
    step: float,
    steps: int = 1,
    peaks: DevicePeaks | None = None,
    classes: Mapping[str, str] | None = None,
) -> list[LayerRow]:
    """Return a row for each layer and direction on each device, the longest first.

    Parameters
    ----------
    kernels
        All kernels of ``steps`` steps.
    work
        Work of one step.
    step
        Seconds of one step, the base of the shares.
    steps
        Number of watched steps.
    peaks
        Peak rates of the device; None if unknown.
    classes
        Classes of the layers' modules, by name.
    """
    summed = _sum(kernels, work, lambda each: (each.place, each.device), lambda each: (each.place, each.device), steps)
    rows = [
        LayerRow(
            layer=place.layer,
            module=(classes or {}).get(place.layer, ""),
            direction=place.direction,  # type: ignore[arg-type]
            device=device,
            **_describe(values, step, peaks),
            byte_bound=values["byte_bound"] if peaks else None,
            flop_bound=values["flop_bound"] if peaks else None,
            forecast=values["forecast"],
        )
        for (place, device), values in summed.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, row.layer, row.direction))


def sum_kinds(
    kernels: Sequence[TimedKernel],
    work: Sequence[PlacedWork],
    *,
    step: float,
    steps: int = 1,
    peaks: DevicePeaks | None = None,
) -> list[KindRow]:
    """Return a row for each kind of kernel, the longest first; the parameters are those of `sum_layers`."""
    known: dict[StepPlace, dict[str, str]] = defaultdict(dict)
    """Kinds of volseg's own kernels, by place and function name."""
    for each in work:
        if not each.name.startswith("aten."):
            known[each.place][each.name.rpartition(".")[2]] = each.kind

    def name_kind(kernel: TimedKernel) -> str:
        if _sends(kernel):
            return "communication"
        special = {"(loss)": "loss", "(optimizer)": "optimizer", "(augmentation)": "augmentation"}
        return special.get(kernel.place.layer) or find_kind(kernel.name, known[kernel.place])

    summed = _sum(kernels, work, name_kind, lambda each: each.kind, steps)
    rows = [KindRow(kind=kind, **_describe(values, step, peaks)) for kind, values in summed.items()]
    return sorted(rows, key=lambda row: (-row.seconds, row.kind))


def _sum(
    kernels: Iterable[TimedKernel],
    work: Iterable[PlacedWork],
    key_of_kernel: Callable[[TimedKernel], Any],
    key_of_work: Callable[[PlacedWork], Any],
    steps: int,
) -> dict[Any, dict[str, Any]]:
    """Return sums of one step by key; work without observed kernels is left out."""
    found: dict[Hashable, dict[str, Any]] = {}
    for kernel in kernels:
        values = found.setdefault(key_of_kernel(kernel), dict.fromkeys(SUMMED) | {"calls": 0.0, "seconds": 0.0})
        values["calls"] += 1 / steps
        values["seconds"] += kernel.seconds / steps
    for each in work:
        values = found.get(key_of_work(each), {})
        for name in SUMMED if values else ():
            if (value := getattr(each, name)) is not None:
                values[name] = (values[name] or 0) + value
    return found


SUMMED = ("flops", "bytes_moved", "byte_bound", "flop_bound", "bound", "forecast")


def _describe(values: Mapping[str, Any], step: float, peaks: DevicePeaks | None) -> dict[str, Any]:
    """Return the common values of rows of layers and of kinds."""
    seconds, bound = values["seconds"], values["bound"] if peaks else None
    flops, moved = values["flops"], values["bytes_moved"]
    is_known = bound is not None and seconds > 0  # unknown for messages
    return {
        "calls": values["calls"],
        "seconds": seconds,
        "share": seconds / step if step > 0 else 0.0,
        "flops": flops,
        "bytes_moved": moved,
        "bound": bound,
        "times_bound": seconds / bound if bound else None,
        "bandwidth_share": moved / seconds / peaks.bytes_per_second if is_known and peaks else None,
        "flop_share": flops / seconds / peaks.flops_per_second if is_known and peaks else None,
    }


def measure(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> measure([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    length, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
