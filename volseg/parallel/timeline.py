"""Measure busy and idle intervals of each stage of a pipeline in single steps, by events on the devices.

Devices are not queried while they work. Events are recorded at the start and end of a micro-batch on a stage, and read
after the step. Outside `Timeline.watching` no events are recorded.

This does not apply to the spatial split or replicas: there all GPUs work on the same layers at the same time, and a GPU
waits for another inside a kernel, where no event can be recorded.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Work of one stage on one micro-batch, in milliseconds from the start of the step."""

    stage: int
    device: str
    what: Pass
    micro_batch: int
    begin: float
    end: float


class NotedMoment(NamedTuple):
    """A point in the queue of a device."""

    stage: int
    device: torch.device
    what: Pass
    micro_batch: int
    is_end: bool
    moment: "torch.cuda.Event | float"


class Timeline:
    """Recorded points of one step.

    Parameters
    ----------
    devices : sequence of device
        Devices of the stages.

    Attributes
    ----------
    micro_batch : int
        Micro-batch whose forward pass is being queued.
    marks : list of NotedMoment
        Recorded so far.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self.micro_batch = 0
        self.marks: list[NotedMoment] = []
        self._ends: dict[torch.device, torch.cuda.Event | float] = {}
        self._zero: dict[torch.device, torch.cuda.Event | float] = {}

    @contextmanager
    def watching(self) -> Iterator["Timeline"]:
        """Record the step in this block; synchronises the devices before and after."""
        self._synchronize()
        # Clocks of different GPUs cannot be compared: record a common point while all are idle.
        self._zero = {device: self._get_moment(device) for device in self.devices}
        try:
            with self.noting():
                yield self
        finally:
            if not self._ends:
                self.end_pass()
            self._synchronize()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take the marks of this block, which may be recorded in a CUDA graph: each replay repeats its events."""
        global _watched
        before, _watched = _watched, self
        try:
            yield
        finally:
            _watched = before

    def mark(self, stage: int, device: torch.device, what: Pass, micro_batch: int, *, is_end: bool) -> None:
        """Record the start or end of a micro-batch on a stage, at the current point of the device's queue."""
        self.marks.append(NotedMoment(stage, device, what, micro_batch, is_end, self._get_moment(device)))

    def end_pass(self) -> None:
        """Record the end of the backward pass; work queued afterwards, such as the optimizer's, does not count."""
        self._ends = {device: self._get_moment(device) for device in self.devices}

    def read(self) -> list[Interval]:
        """Return the recorded intervals; call it after the step.

        A stage's backward pass of a micro-batch starts when the gradient has arrived, and ends when the stage's own
        gradient leaves. The first stage sends none: it counts as busy until its device starts something else.
        """
        at = [(mark, self._measure(mark.device, mark.moment)) for mark in self.marks]
        ends = {device: self._measure(device, moment) for device, moment in self._ends.items()}
        places = {mark.stage: str(mark.device) for mark in self.marks}
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
    def _get_moment(device: torch.device) -> "torch.cuda.Event | float":
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
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
    """Yield micro-batch, start and end of a stage's work."""
    own = [(mark, moment) for mark, moment in at if (mark.stage, mark.what) == (stage, what)]
    for number in sorted({mark.micro_batch for mark, _ in own}):
        begins = [moment for mark, moment in own if mark.micro_batch == number and not mark.is_end]
        left = [moment for mark, moment in own if mark.micro_batch == number and mark.is_end]
        if not begins:  # a stage whose output nothing uses
            continue
        device = own[0][0].device
        later = [moment for mark, moment in at if mark.device == device and moment > max(begins)]
        yield number, min(begins), max(left) if left else min([*later, ends.get(device, max(begins))])


_watched: Timeline | None = None
"""Timeline of the process (autograd's threads share it)."""


def get_timeline() -> Timeline | None:
    """Return the active timeline; None in nearly every step."""
    return _watched


def compute_idle_shares(intervals: Sequence[Interval]) -> dict[int, float]:
    """Return the idle share of each stage, between the first and last work of any stage.

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
