"""Estimate the time of a traced step: play its kernels in order on each stream, with Python's launches ahead of them.

Python launches an eager step operator by operator while the GPU works: a kernel begins once it is launched and the
kernel before it on its stream is done. So an eager step takes as long as the slower of Python and the GPU, and a
replay, which Python launches at once, as long as its kernels. Streams run concurrently within a part of the step. The
slowest of several devices counts; the stages of a pipeline follow a schedule.

Not modelled: making batches (which overlaps with the step), validation, checkpoints, and the slowdown of concurrent
kernels on different streams.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from volseg.estimate.gpu_kinds import GpuKind, HostRates
from volseg.estimate.instances import Links
from volseg.estimate.trace import Event, KernelRun, Mark, Sent, StepTrace

SLAB_KERNELS = ("norm.passes", "norm.statistics")
"""Kernels that identify a network on slabs, whose norms are never torch's."""

OF_STAGES = 2.4
"""Python's time for a pipeline's forward pass, over that of a plain one: 10.4 ms against 4.3 (docs/measurements.md)."""

OF_MESSAGES = "peer.planes."
"""Kernels that exchange planes; they count as 0 s, as the measured time of a message includes sending and reading."""

PARTS = ("forward", "loss", "backward", "optimizer")
"""Parts of a step, named as in the marks."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step."""

    seconds: float
    """Seconds from the end of one step to the end of the next."""
    parts: Mapping[str, float]
    """Seconds of a device's kernels by part: ``forward``, ``loss``, ``backward``, ``optimizer``, ``rest``."""
    host: float
    """Seconds that Python takes to launch the kernels."""
    host_forward: float
    """The share of ``host`` in the forward pass."""


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
        One trace per device.
    gpu
        Kind of the devices.
    links
        Links between the devices.
    recorded
        Whether the step is replayed from a recording.
    stages
        Whether the devices are the stages of a pipeline, in order, in one process; else each has its own process.
    micro_batches
        Number of micro-batches that pass through the stages.
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
    """Return the seconds of a pipeline's step: all micro-batches forward, then all backward.

    Parameters
    ----------
    stages
        Seconds of one micro-batch per stage, forward and backward.
    micro_batches
        Number of micro-batches.

    Notes
    -----
    A stage begins a micro-batch when it has finished the previous one, and the previous stage has finished this one.
    With ``p`` equal stages, each direction takes ``(m + p - 1)`` times as long as one stage [1]_.

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
    """Return the events of one step: those of the recording if it is replayed, else those of the last step.

    A pipeline records its stages one by one, so no recording is a whole step: the last eager step before it is used.
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
    """Play a step twice in a row: if Python runs ahead, only the second shows the time of a step.

    Python's time for the forward pass is multiplied by ``forward``.
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
        host += host_rates["replay"] if recorded else 0.0
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
    """End a part, at which all streams synchronize; return the seconds of its busiest stream."""
    longest = max(busy.values(), default=0.0)
    end = max(ready.values(), default=0.0)
    for stream in ready:
        ready[stream] = end
    busy.clear()
    return longest


def _find_length(event: Event, gpu: GpuKind, links: Links) -> float:
    """Return the device's seconds for an event; Python's seconds are counted separately."""
    if isinstance(event, KernelRun):
        return 0.0 if event.name.startswith(OF_MESSAGES) else gpu.seconds(event)
    return links.seconds(event) if isinstance(event, Sent) else 0.0


def estimate_host_seconds(event: KernelRun | Sent, part: str, rates: HostRates, on_slabs: bool) -> float:
    """Return Python's seconds to launch a kernel or a message, in a part of an eager step."""
    if isinstance(event, Sent):
        return rates[{"halo": "exchange", "copy": "operator"}.get(event.kind, "message")]
    if part not in ("forward", "loss", "backward"):
        return rates["operator"]
    if not event.name.startswith("aten.") or (on_slabs and "convolution" in event.name):
        return rates["slab" if on_slabs else "triton"]
    norms = ("batch_norm", "group_norm", "layer_norm")
    is_norm = any(name in event.name for name in norms)
    kind = "convolution" if "convolution" in event.name else "norm" if is_norm else "pointwise"
    return rates[f"{kind} {'backward' if part == 'backward' else 'forward'}"]
