"""What the first steps of a training take of each GPU, beside what was forecast of them.

torch's own counters are read, which waits for no GPU: after the second optimizer step, when optimizer and averages have
come into being, and again when a step has been recorded, whose memory stays taken. The forecast is made elsewhere and
may come later than the steps, or never.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from volseg.checkpointing.state import EpochRecord
from volseg.forecast.memory_use import MemoryUse
from volseg.parallel.devices import find_rank, list_gpus, uses_gpus
from volseg.parallel.processes.group import gather_over_processes
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

__all__ = ["DeviceMemory", "FirstSteps", "GpuMeter", "MemoryForecast", "MemoryReading"]

logger = logging.getLogger(__name__)

FIRST = 2
"""Optimizer steps before the first reading."""

RECORDED = 8
"""Before the second one: a step is recorded as its fourth, some strategies measure for a few more."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Peaks of one device in bytes."""

    device: str
    used: int
    """In blocks that somebody holds: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Taken from the device: ``torch.cuda.max_memory_reserved``."""
    process: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """The peaks of all devices of all processes after some steps."""

    steps: int
    devices: tuple[DeviceMemory, ...]

    @property
    def fullest(self) -> DeviceMemory:
        """The device that has most reserved."""
        return max(self.devices, key=lambda device: device.reserved)


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What was forecast of the step, or why nothing was."""

    memory: MemoryUse | None = None
    """Of the device that needs most."""
    devices: tuple[MemoryUse, ...] = ()
    """Of every device, in the order of the readings."""
    problem: str = ""


class Meter(Protocol):
    """What counts the memory of this process's devices."""

    def begin(self) -> None:
        """Count peaks from here on."""

    def read(self) -> Sequence[DeviceMemory]:
        """Return the peaks."""


class Asked(Protocol):
    """A forecast that can be made."""

    def begin(self) -> None:
        """Begin with it, in another process; once."""

    def poll(self) -> MemoryForecast | None:
        """Return it if it is there; never waits."""

    def close(self) -> None:
        """Give up on it."""


class FirstSteps(Hook):
    """Read what the first steps took, and say once how far that is from the forecast.

    Parameters
    ----------
    meter : Meter
        Of this process's devices.
    asked : Asked, optional
        The forecast, in the process that writes.
    beside : int
        Bytes of each device that something else than the step holds: the cases that lie there.
    write : callable
        Takes what is known, as plain values, whenever that is more than before.
    first_epoch : int
        Whose steps are those that are forecast; patches may be smaller before.
    """

    def __init__(
        self,
        meter: Meter,
        asked: Asked | None = None,
        *,
        beside: int = 0,
        write: Callable[[Mapping[str, Any]], object] | None = None,
        first_epoch: int = 0,
    ) -> None:
        self._meter, self._asked, self._beside, self._write = meter, asked, beside, write
        self._full_from = first_epoch
        self._batches = self._first_epoch = self._seen = 0
        self.forecast: MemoryForecast | None = None
        self.readings: list[MemoryReading] = []
        self._told = 0

    def on_training_begin(self, training: Training) -> None:
        """Count this part's steps from its own first one: what another process took is no peak of this one."""
        self._batches, self._first_epoch = 0, max(training.epoch, self._full_from)
        self.readings = []
        self._meter.begin()

    def on_epoch_begin(self, training: Training) -> None:
        """Forget what steps on smaller patches took, and validations between them."""
        if training.epoch == self._first_epoch == self._full_from > 0 and training.position == 0:
            self._meter.begin()

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Read after the steps that tell; all processes at the same ones."""
        del fields
        self._seen += 1
        if self._asked is not None and self._seen == RECORDED * training.accumulate:
            # Not earlier: on a machine of few cores its seconds of Python would be taken from the preparation of cases,
            # and from the steps before one is recorded, which the GPU waits for.
            self._asked.begin()
        if training.epoch < self._first_epoch:
            return
        self._batches += 1
        steps, rest = divmod(self._batches, training.accumulate)
        # A validation takes memory of its own: what is to be read is read before the first one.
        is_last = steps < RECORDED and training.position == training.num_batches
        tells = rest == 0 and (steps in (FIRST, RECORDED) or is_last)
        if not tells or training.epoch != self._first_epoch:
            return
        own = [json.dumps(asdict(device)) for device in self._meter.read()]
        devices = tuple(DeviceMemory(**json.loads(told)) for told in gather_over_processes(own))
        if devices:
            self.readings.append(MemoryReading(steps=steps, devices=devices))
        self._look(training)

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """Look whether the forecast has come."""
        del record
        self._look(training)

    def on_training_end(self, training: Training) -> None:
        """Wait no longer for a forecast."""
        self._look(training)
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def scalars(self) -> dict[str, float]:
        """Return what TensorBoard shows: GiB of the fullest device, of the forecast, and what was forecast of each."""
        shown: dict[str, float] = {}
        if self.readings:
            fullest = self.readings[-1].fullest
            shown = {
                "memory/measured_used_gib": fullest.used / GIB,
                "memory/measured_reserved_gib": fullest.reserved / GIB,
                "memory/cases_gib": self._beside / GIB,
            }
        if self.forecast is not None and self.forecast.memory is not None:
            shown["memory/forecast_used_gib"] = self.forecast.memory.used / GIB
            shown["memory/forecast_reserved_gib"] = self.forecast.memory.reserved / GIB
            for number, device in enumerate(self.forecast.devices):
                shown[f"gpu/{number}/forecast_gib"] = device.reserved / GIB
        if (error := self.find_error()) is not None:
            shown["memory/forecast_error_percent"] = 100 * error
        return shown

    def find_error(self) -> float | None:
        """Return by what part of the measured memory of a step the forecast is too high; None as long as one lacks."""
        memory = None if self.forecast is None else self.forecast.memory
        if memory is None or not self.readings:
            return None
        measured = max(self.readings[-1].fullest.reserved - self._beside, 1)
        return memory.reserved / measured - 1

    def describe(self) -> str | None:
        """Return in a sentence what was measured and forecast; None before anything was measured."""
        if not self.readings:
            return None
        reading = self.readings[-1]
        fullest = reading.fullest
        cases = f", of it {self._beside / GIB:.2f} GiB cases" if self._beside else ""
        text = (
            f"memory after {reading.steps} steps: {fullest.reserved / GIB:.2f} GiB reserved and "
            f"{fullest.used / GIB:.2f} GiB used of {fullest.device} of process {fullest.process}, the fullest of "
            f"{len(reading.devices)}{cases}"
        )
        if self.forecast is None:
            return f"{text}; no forecast has come"
        if self.forecast.memory is None:
            return f"{text}; no forecast: {self.forecast.problem}"
        error = self.find_error()
        assert error is not None
        memory = self.forecast.memory
        return (
            f"{text}; forecast of a step: {memory.reserved / GIB:.2f} GiB reserved and {memory.used / GIB:.2f} GiB "
            f"used ({error:+.1%})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything that is known, as plain values."""
        forecast = self.forecast
        return {
            "measured": [asdict(reading) for reading in self.readings],
            "cases_bytes": self._beside,
            "forecast": None if forecast is None or forecast.memory is None else asdict(forecast.memory),
            "forecast_of_devices": [] if forecast is None else [asdict(device) for device in forecast.devices],
            "no_forecast": None if forecast is None else forecast.problem or None,
            "error": self.find_error(),
        }

    def _look(self, training: Training) -> None:
        """Take the forecast if it has come; write and say what is new."""
        if not training.is_main_process:
            return
        if self.forecast is None and self._asked is not None:
            self.forecast = self._asked.poll()
        known = len(self.readings) + (self.forecast is not None)
        if known == self._told or not self.readings:
            return
        self._told = known
        if self._write is not None:
            self._write(self.as_json())
        if self.forecast is not None:
            logger.info("%s", self.describe())


class GpuMeter:
    """What torch's allocator counts on the GPUs that this process uses; nothing waits for one."""

    def begin(self) -> None:
        """Count peaks from here on: what was tried before, to choose kernels or a layout, is given back."""
        if uses_gpus():
            torch.cuda.empty_cache()
        for gpu in self._read_counters():
            torch.cuda.reset_peak_memory_stats(gpu)

    def read(self) -> list[DeviceMemory]:
        """Return the peaks."""
        return [
            DeviceMemory(
                device=str(gpu),
                used=counters["allocated_bytes"]["all"]["peak"],
                reserved=counters["reserved_bytes"]["all"]["peak"],
                process=find_rank(),
            )
            for gpu, counters in self._read_counters().items()
        ]

    def count(self) -> int:
        """Return the bytes that are given out now, of the GPU on which most are."""
        counts = (counters["allocated_bytes"]["all"]["current"] for counters in self._read_counters().values())
        return max(counts, default=0)

    @staticmethod
    def _read_counters() -> dict[torch.device, dict[str, Any]]:
        """Return the counters of each GPU that is used, by one call for each.

        ``torch.cuda.max_memory_allocated`` and its like read all counters, flatten and sort them, for one number.
        """
        if not uses_gpus():
            return {}
        found = {gpu: torch.cuda.memory_stats_as_nested_dict(gpu) for gpu in list_gpus()}  # empty before CUDA begins
        return {
            gpu: counters
            for gpu, counters in found.items()
            if counters and counters["reserved_bytes"]["all"]["current"]
        }
