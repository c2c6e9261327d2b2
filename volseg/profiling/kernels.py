"""Define the kernels of a profile with their layers and their work, and sum them. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from volseg.profiling.report import DevicePeaks, DeviceTimes, KindRow, LayerRow

LOSS, OPTIMIZER, AUGMENTATION, OUTSIDE = "(loss)", "(optimizer)", "(augmentation)", "(step)"
"""Names for work outside the network's layers."""


MARK = "volseg: "
"""Prefix of the names of ranges in a trace that mark the place of a step."""


class StepPlace(NamedTuple):
    """The layer and direction that a kernel runs for."""

    layer: str
    """Dotted name of the module in the plain network, or one of the names in brackets."""
    direction: str
    """``forward``, ``backward``, ``recompute``, ``optimizer``, ``augmentation``, ``communication`` or ``other``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """A kernel that ran; on a CPU an operator."""

    name: str
    place: StepPlace
    start: float
    """Seconds from an arbitrary origin."""
    seconds: float
    device: int = 0
    stream: int = 0

    @property
    def end(self) -> float:
        """End of the kernel, in the same seconds as ``start``."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """Work at a place of a step, and the least time that a device needs for it."""

    name: str
    place: StepPlace
    kind: str
    flops: int
    """Floating-point operations of matrix units, two per multiply-add; 0 for passes over memory."""
    bytes_moved: int
    """Bytes read and written, each tensor once."""
    forecast: float
    """Seconds, estimated from the table of measured kernels."""
    bound: float | None = None
    """Seconds that the memory or the matrix units need, whichever is longer, kernel by kernel; None for messages."""
    device: int = 0


TRAVELLING = (
    *("nccl", "c10d::", "gloo", "memcpy ptop", "memcpy peer"),
    *("_exchange_planes", "_exchange_values", "_send_kernel", "_receive_kernel"),
)
"""Parts of the names of kernels that carry data between devices, in lower case."""

TRAVELLING_NORMS = ("_exchange_coefficients", "_exchange_backward")
"""Kernels of norms on any number of devices; on several they wait for each other's sums."""


def travels(name: str, *, alone: bool = True) -> bool:
    """Return whether a kernel carries data between devices, or waits for data.

    Parameters
    ----------
    name
        Name of the kernel.
    alone
        Whether this device is the only one that computes these layers.

    Examples
    --------
    >>> [travels(name) for name in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "_send_kernel", "_affine_kernel")]
    [True, True, False]
    >>> [travels("_exchange_coefficients_kernel", alone=alone) for alone in (True, False)]
    [False, True]
    """
    small = name.lower()
    return any(part in small for part in (TRAVELLING if alone else TRAVELLING + TRAVELLING_NORMS))


KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("convolution", ("conv", "fprop", "dgrad", "wgrad", "implicit_gemm", "taps", "one_voxel", "depthwise", "winograd")),
    ("product", ("gemm", "aten.mm", "::mm", "addmm", "bmm", "matmul", "attention", "cutlass", "linear")),
    ("norm", ("norm", "moments", "_affine_kernel", "_direct_", "coefficients", "_input_kernel", "welford")),
    ("optimizer", ("adam", "sgd", "multi_tensor_apply", "_foreach", "fused_")),
    ("loss", ("dice", "cross_entropy", "nll_loss", "softmax")),
    ("resampling", ("upsample", "_double_kernel", "interpolate", "grid_sample", "pool")),
    ("copy", ("copy", "memcpy", "memset", "clone", "cat", "fill", "zero", "pad", "nchw", "nhwc", "transpose")),
    ("reduction", ("sum", "mean", "reduce", "max", "min")),
)
"""Kinds of kernels, by parts of their names in lower case; the first match counts."""


def find_kind(name: str, known: Mapping[str, str] | None = None) -> str:
    """Return the kind of a kernel of torch, cuDNN or volseg, from its name.

    Parameters
    ----------
    name
        Name in the profiler's output, or name of an operator.
    known
        Kinds of kernels whose names do not show their kind.

    Examples
    --------
    >>> [find_kind(name) for name in ("sm90_xmma_fprop_implicit_gemm", "aten.native_batch_norm", "aten.add")]
    ['convolution', 'norm', 'pointwise']
    >>> find_kind("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    'communication'
    """
    if travels(name):
        return "communication"
    if known is not None and name in known:
        return known[name]
    small = name.lower()
    return next((kind for kind, parts in KINDS if any(part in small for part in parts)), "pointwise")


# Sums of kernels and their work by layer, direction and kind.


def as_kernels(work: Iterable[PlacedWork]) -> list[TimedKernel]:
    """Return estimated work as consecutive kernels with their forecast durations."""
    found, ends = [], defaultdict[int, float](float)
    for each in work:
        begin = ends[each.device]
        ends[each.device] += each.forecast
        found.append(
            TimedKernel(name=each.name, place=each.place, start=begin, seconds=each.forecast, device=each.device)
        )
    return found


def sum_device_times(
    kernels: Iterable[TimedKernel], *, device: int, step: float, steps: int = 1, exposed: float | None = None
) -> DeviceTimes:
    """Return how long a device computes, communicates and waits in a step.

    Parameters
    ----------
    kernels
        All kernels of the profiled steps; those of other devices are ignored.
    device
        Number of the device.
    step
        Seconds of one step without a profiler; raised to the total of its kernels if these take longer.
    steps
        Number of profiled steps.
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
        Number of profiled steps.
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


SUMMED = ("flops", "bytes_moved", "bound")


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
