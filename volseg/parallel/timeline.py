"""When each stage of a pipeline works, and when it waits: measured in single steps, by events on the devices.

A device is asked nothing while it works. Events are put into its queue where a micro-batch begins and ends on a stage,
and are read when the step is over. Outside of `Timeline.watching` nothing is put anywhere.

Not for the spatial split, nor for replicas: there all GPUs work on the same layers at the same time, and one that waits
for another does so within a kernel, between whose begin and end no event can be put.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

__all__ = ["Interval", "NotedMoment", "Pass", "Timeline", "compute_idle_shares", "find_timeline"]

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Work of one stage on one micro-batch, in milliseconds from the beginning of the step."""

    stage: int
    device: str
    what: Pass
    micro_batch: int
    begin: float
    end: float


class NotedMoment(NamedTuple):
    """A moment in the queue of a device."""

    stage: int
    device: torch.device
    what: Pass
    micro_batch: int
    is_end: bool
    moment: "torch.cuda.Event | float"


class Timeline:
    """Moments of one step.

    Parameters
    ----------
    devices : sequence of device
        Of the stages.

    Attributes
    ----------
    micro_batch : int
        Whose forward pass is being queued.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self.micro_batch = 0
        self._marks: list[NotedMoment] = []
        self._ends: dict[torch.device, torch.cuda.Event | float] = {}
        self._zero: dict[torch.device, torch.cuda.Event | float] = {}

    @contextmanager
    def watching(self) -> Iterator["Timeline"]:
        """Note the step in here; waits for the devices before it and after it."""
        global _watched
        self._synchronize()
        # Clocks of different GPUs cannot be compared: each is read at this one moment, when all have nothing to do.
        self._zero = {device: self._find_moment(device) for device in self.devices}
        _watched = self
        try:
            yield self
        finally:
            _watched = None
            if not self._ends:
                self.end_pass()
            self._synchronize()

    def mark(self, stage: int, device: torch.device, what: Pass, micro_batch: int, *, is_end: bool) -> None:
        """Note that a micro-batch begins or ends on a stage, when the device comes to what is queued next."""
        self._marks.append(NotedMoment(stage, device, what, micro_batch, is_end, self._find_moment(device)))

    def end_pass(self) -> None:
        """Note that the backward pass is over, when the devices come to what is queued next, such as the optimizer."""
        self._ends = {device: self._find_moment(device) for device in self.devices}

    def read(self) -> list[Interval]:
        """Return what was noted; to be called after the step.

        A stage begins a micro-batch's backward pass when the gradient has arrived, and ends when its own leaves. The
        first one sends nothing: it is taken to work until its device begins something else.
        """
        at = [(mark, self._measure(mark.device, mark.moment)) for mark in self._marks]
        ends = {device: self._measure(device, moment) for device, moment in self._ends.items()}
        places = {mark.stage: str(mark.device) for mark in self._marks}
        found = [
            Interval(stage=stage, device=places[stage], what=what, micro_batch=number, begin=begin, end=end)
            for what in ("forward", "backward")
            for stage in sorted(places)
            for number, begin, end in _pair(stage, what, at, ends)  # type: ignore[arg-type]
        ]
        return sorted(found, key=lambda interval: (interval.stage, interval.begin))

    def _synchronize(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @staticmethod
    def _find_moment(device: torch.device) -> "torch.cuda.Event | float":
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _measure(self, device: torch.device, moment: "torch.cuda.Event | float") -> float:
        zero = self._zero[device]
        if isinstance(moment, float):
            assert isinstance(zero, float)
            return 1e3 * (moment - zero)
        assert not isinstance(zero, float)
        return float(zero.elapsed_time(moment))


def _pair(
    stage: int, what: Pass, at: Sequence[tuple[NotedMoment, float]], ends: Mapping[torch.device, float]
) -> Iterator[tuple[int, float, float]]:
    """Yield micro-batch, begin and end of a stage's work."""
    own = [(mark, moment) for mark, moment in at if (mark.stage, mark.what) == (stage, what)]
    for number in sorted({mark.micro_batch for mark, _ in own}):
        begins = [moment for mark, moment in own if mark.micro_batch == number and not mark.is_end]
        left = [moment for mark, moment in own if mark.micro_batch == number and mark.is_end]
        if not begins:  # a stage whose output nobody needs
            continue
        device = own[0][0].device
        later = [moment for mark, moment in at if mark.device == device and moment > max(begins)]
        yield number, min(begins), max(left) if left else min([*later, ends.get(device, max(begins))])


_watched: Timeline | None = None
"""Of the process, as autograd's threads are."""


def find_timeline() -> Timeline | None:
    """Return where moments are to be noted; None in nearly every step."""
    return _watched


def compute_idle_shares(intervals: Sequence[Interval]) -> dict[int, float]:
    """Return for each stage the part of the step, from its first to its last work anywhere, in which it did none.

    >>> work = dict(device="cpu", what="forward", micro_batch=0)
    >>> compute_idle_shares([Interval(stage=0, begin=0, end=3, **work), Interval(stage=1, begin=3, end=4, **work)])
    {0: 0.25, 1: 0.75}
    """
    if not intervals:
        return {}
    first = min(interval.begin for interval in intervals)
    last = max(interval.end for interval in intervals)
    shares = {}
    for stage in sorted({interval.stage for interval in intervals}):
        busy, reached = 0.0, first
        for own in sorted((one.begin, one.end) for one in intervals if one.stage == stage):
            busy += max(0.0, own[1] - max(own[0], reached))
            reached = max(reached, own[1])
        shares[stage] = 1 - busy / max(last - first, 1e-9)
    return shares
