"""How long a followed step takes: its kernels one behind the other on each stream, and what has to wait for what.

An eager step is started by Python, operator by operator, while the GPU works: each kernel begins when it has been
started and the one before it on its stream is done. So a step is as long as the slower of the two, and a replay, which
Python starts at once, as long as its kernels. Streams of one part of the step run beside each other. Of several
devices the slowest counts; the stages of a pipeline follow a schedule.

Not counted: making batches (which goes on beside the step), validation, checkpoints, and kernels of different streams
slowing each other.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from volseg.estimate.gpu_kinds import GpuKind, HostRates
from volseg.estimate.instances import Links
from volseg.estimate.trace import Event, KernelRun, Mark, Sent, StepTrace

__all__ = [
    "OF_STAGES",
    "PARTS",
    "StepTimes",
    "estimate_host_seconds",
    "estimate_pipeline_seconds",
    "estimate_times",
]

SLAB_KERNELS = ("norm.passes", "norm.statistics")
"""By which a network on slabs is known: its norms are never torch's."""

OF_STAGES = 2.4
"""Times what a forward pass alone takes Python, which a pipeline's takes: 10.4 ms beside 4.3 (docs/measurements.md)."""

OF_MESSAGES = "peer.planes."
"""Kernels by which planes travel: the time of a message was measured with the one that sends and the one that reads."""

PARTS = ("forward", "loss", "backward", "optimizer")
"""Of a step, as marks name them."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step."""

    seconds: float
    """From one step's end to the next one's."""
    parts: Mapping[str, float]
    """Of a device's kernels: ``forward``, ``loss``, ``backward``, ``optimizer``, ``rest``."""
    host: float
    """Of Python, which starts the kernels."""
    host_forward: float
    """Of that, what the forward pass takes."""


def estimate_times(
    traces: Sequence[StepTrace],
    gpu: GpuKind,
    links: Links,
    *,
    recorded: bool = False,
    stages: bool = False,
    micro_batches: int = 1,
) -> StepTimes:
    """Return the seconds of a step, by part.

    Parameters
    ----------
    traces
        One of each device.
    gpu
        What these are.
    links
        What connects them.
    recorded
        Whether the step is replayed from a recording.
    stages
        Whether the devices are a pipeline's stages, in order, that one process drives; else each has its own.
    micro_batches
        Pieces of a batch that go through the stages one behind the other.
    """
    times = [
        _time_device(select_step(trace.events), gpu, links, recorded, OF_STAGES if stages else 1.0) for trace in traces
    ]
    slowest = max(times, key=lambda device: device.seconds)
    if not stages or len(times) == 1:
        return slowest
    around = max(sum(part for name, part in d.parts.items() if name not in ("forward", "backward")) for d in times)
    split = [(d.parts["forward"] / micro_batches, d.parts["backward"] / micro_batches) for d in times]
    host = slowest.host if recorded else sum(device.host for device in times)
    return StepTimes(
        seconds=max(estimate_pipeline_seconds(split, micro_batches) + around, host),
        parts=slowest.parts,
        host=host,
        host_forward=sum(device.host_forward for device in times),
    )


def estimate_pipeline_seconds(stages: Sequence[tuple[float, float]], micro_batches: int) -> float:
    """Return how long stages take for micro-batches, all forward and then all backward.

    Parameters
    ----------
    stages
        Seconds of one micro-batch, forward and backward.
    micro_batches
        How many.

    Notes
    -----
    A stage begins with a micro-batch when it has done the one before, and the stage before has done this one. For
    ``p`` equal stages that is ``(m + p - 1)`` times one of them, either way [1]_.

    References
    ----------
    .. [1] Huang et al.: GPipe. NeurIPS 2019, arXiv:1811.06965, section 2.3.
    """
    forward = _pass_through([stage[0] for stage in stages], micro_batches)
    return forward + _pass_through([stage[1] for stage in reversed(stages)], micro_batches)


def _pass_through(stages: Sequence[float], micro_batches: int) -> float:
    done = [0.0] * len(stages)
    for _ in range(micro_batches):
        before = 0.0
        for number, seconds in enumerate(stages):
            before = done[number] = max(before, done[number]) + seconds
    return done[-1]


def select_step(events: Sequence[Event]) -> list[Event]:
    """Return the events of one step: of the recording, where one is replayed, else of the last step that begins.

    A pipeline records its stages one by one, which shows no step as a whole: the eager one before tells its kernels.
    """
    names = [(place, event.name) for place, event in enumerate(events) if isinstance(event, Mark)]
    recorded = next((place for place, name in names if name == "record_pipeline"), None)
    if recorded is not None:
        names = names[
            : max(number for number, (place, name) in enumerate(names) if name == "step" and place < recorded)
        ]
    begins = [place for place, name in names if name == "record"] or [place for place, name in names if name == "step"]
    start = begins[-1] if begins else 0
    ends = (place for place, name in names if place > start and name in ("replay", "step", "end"))
    return list(events[start : next(ends, len(events))])


def _time_device(events: Sequence[Event], gpu: GpuKind, links: Links, recorded: bool, forward: float) -> StepTimes:
    """Play a step twice, one behind the other: where Python is ahead, the second one shows what a step takes.

    Python takes ``forward`` times as long over a forward pass as it does over the network alone.
    """
    host_rates = gpu.host_rates()
    on_slabs = any(isinstance(event, KernelRun) and event.name.startswith(SLAB_KERNELS) for event in events)
    lengths = [_find_length(event, gpu, links) for event in events]
    parts: dict[str, float] = dict.fromkeys((*PARTS, "rest"), 0.0)
    host, host_forward, ends = 0.0, 0.0, [0.0]
    ready: dict[int, float] = defaultdict(float)
    for _ in range(2):
        parts, part = dict.fromkeys(parts, 0.0), "rest"
        began, host_began, host_forward = ends[-1], host, 0.0
        busy: dict[int, float] = defaultdict(float)
        host += host_rates.replay if recorded else 0.0
        for event, length in zip(events, lengths, strict=True):
            if isinstance(event, Mark):
                parts[part] += _close(busy, ready)
                part = event.name if event.name in PARTS else part
            elif isinstance(event, KernelRun | Sent):
                share = 0.0 if recorded else estimate_host_seconds(event, part, host_rates, on_slabs)
                share *= forward if part == "forward" else 1.0
                host_forward += share if part == "forward" else 0.0
                host += share
                ready[event.stream] = max(ready[event.stream], host) + length
                busy[event.stream] += length
        parts[part] += _close(busy, ready)
        ends.append(max([host, *ready.values()]))
    return StepTimes(seconds=ends[-1] - began, parts=parts, host=host - host_began, host_forward=host_forward)


def _close(busy: dict[int, float], ready: dict[int, float]) -> float:
    """End a part, for whose end all streams wait; return how long its busiest stream was."""
    longest = max(busy.values(), default=0.0)
    end = max(ready.values(), default=0.0)
    for stream in ready:
        ready[stream] = end
    busy.clear()
    return longest


def _find_length(event: Event, gpu: GpuKind, links: Links) -> float:
    """Return how long the device is at it: a message recorded or not, for what Python takes is counted apart."""
    if isinstance(event, KernelRun):
        return 0.0 if event.name.startswith(OF_MESSAGES) else gpu.seconds(event)
    return links.seconds(event) if isinstance(event, Sent) else 0.0


def estimate_host_seconds(event: KernelRun | Sent, part: str, rates: HostRates, on_slabs: bool) -> float:
    """Return what Python takes to start a kernel or a message, in a part of an eager step."""
    if isinstance(event, Sent):
        return {"halo": rates.exchange, "copy": rates.operator}.get(event.kind, rates.message)
    if part not in ("forward", "loss", "backward"):
        return rates.operator
    if not event.name.startswith("aten.") or (on_slabs and "convolution" in event.name):
        return rates.slab if on_slabs else rates.triton
    norms = ("batch_norm", "group_norm", "layer_norm")
    is_norm = any(name in event.name for name in norms)
    kind = "convolution" if "convolution" in event.name else "norm" if is_norm else "pointwise"
    return (rates.backward if part == "backward" else rates.forward)[kind]
