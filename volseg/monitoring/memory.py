"""Measure peaks of GPU memory in the first steps of a training, and compare them with a plan's estimate.

Reading torch's counters does not wait for a GPU. They are read after a step has been recorded, since its memory stays
allocated.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from volseg.estimate.step_memory import MemoryUse
from volseg.parallel.devices import get_process_rank, list_gpus, uses_gpus
from volseg.parallel.processes.group import gather_over_processes
from volseg.workflow.hooks import Hook
from volseg.workflow.training import Training

logger = logging.getLogger(__name__)

STEPS = 8
"""Optimizer steps before the reading; the fourth step is recorded, or a later one with some strategies."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Peaks of one device in bytes."""

    device: str
    used: int
    """Bytes allocated to tensors: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Bytes reserved from the device: ``torch.cuda.max_memory_reserved``."""
    process: int = 0


class FirstSteps(Hook):
    """Read the memory of the first steps, and report its difference from an estimate.

    Parameters
    ----------
    meter : GpuMeter
        Meter of this process's devices.
    estimate : MemoryUse, optional
        Estimate of a step on the device with the highest need; None without a plan.
    beside : int
        Bytes per device used for cases, which the estimate does not include.
    write : callable
        Called with the result as plain values after the reading.
    first_epoch : int
        First epoch of the estimated steps; earlier epochs may have smaller patches.
    """

    def __init__(
        self,
        meter: "GpuMeter",
        estimate: MemoryUse | None = None,
        *,
        beside: int = 0,
        write: Callable[[Mapping[str, Any]], object] | None = None,
        first_epoch: int = 0,
    ) -> None:
        self._meter, self.estimate, self._beside, self._write = meter, estimate, beside, write
        self._full_from = first_epoch
        self._batches = self._first_epoch = 0
        self.steps = 0
        """Optimizer steps before the reading; 0 until then."""
        self.devices: list[DeviceMemory] = []

    def on_training_begin(self, training: Training) -> None:
        """Count steps and peaks from the start of this process."""
        self._batches, self._first_epoch = 0, max(training.epoch, self._full_from)
        self.steps, self.devices = 0, []
        self._meter.begin()

    def on_epoch_begin(self, training: Training) -> None:
        """Reset the peaks that steps on smaller patches and their validations caused."""
        if training.epoch == self._first_epoch == self._full_from > 0 and training.position == 0:
            self._meter.begin()

    def on_batch_end(self, training: Training, fields: Mapping[str, Any]) -> None:
        """Read the peaks after `STEPS` steps, or a shorter epoch, in all processes at the same step."""
        del fields
        if self.steps or training.epoch != self._first_epoch:
            return
        self._batches += 1
        steps, rest = divmod(self._batches, training.accumulate)
        # A validation uses memory too, so the reading precedes the first validation.
        if rest or (steps < STEPS and training.position < training.num_batches):
            return
        self.steps, self.devices = steps, gather_memory(self._meter)
        if self.devices and training.is_main_process:
            if self._write is not None:
                self._write(self.as_json())
            logger.info("%s", self.describe())

    @property
    def fullest(self) -> DeviceMemory:
        """The device with the most reserved memory."""
        return max(self.devices, key=lambda device: device.reserved)

    def compute_memory_error(self) -> float | None:
        """Return the estimate's error relative to the measured memory; None if either is missing."""
        if self.estimate is None or not self.devices:
            return None
        return self.estimate.reserved / max(self.fullest.reserved - self._beside, 1) - 1

    def describe(self) -> str | None:
        """Return measurement and estimate as a sentence; None before the reading."""
        if not self.devices:
            return None
        fullest = self.fullest
        cases = f", including {self._beside / GIB:.2f} GiB of cases" if self._beside else ""
        text = (
            f"memory after {self.steps} steps: {fullest.reserved / GIB:.2f} GiB reserved and "
            f"{fullest.used / GIB:.2f} GiB used on {fullest.device} of process {fullest.process}, the fullest of "
            f"{len(self.devices)} GPU(s){cases}"
        )
        if self.estimate is None:
            return text
        return (
            f"{text}; estimate of a step: {self.estimate.reserved / GIB:.2f} GiB reserved and "
            f"{self.estimate.used / GIB:.2f} GiB used ({self.compute_memory_error():+.1%})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the reading and the estimate as plain values."""
        reading = {"steps": self.steps, "devices": [asdict(device) for device in self.devices]}
        return {
            "measured": [reading] if self.devices else [],
            "cases_bytes": self._beside,
            "forecast": None if self.estimate is None else asdict(self.estimate),
            "error": self.compute_memory_error(),
        }


class GpuMeter:
    """Read the counters of torch's allocator for this process's GPUs, without waiting for a GPU."""

    def begin(self) -> None:
        """Free the cached memory of earlier trials, such as of kernels or layouts, and reset the peaks."""
        if uses_gpus():
            torch.cuda.empty_cache()
        for gpu in self._read_counters():
            torch.cuda.reset_peak_memory_stats(gpu)

    def read(self) -> list[DeviceMemory]:
        """Return the peaks of each GPU."""
        return [
            DeviceMemory(
                device=str(gpu),
                used=counters["allocated_bytes"]["all"]["peak"],
                reserved=counters["reserved_bytes"]["all"]["peak"],
                process=get_process_rank(),
            )
            for gpu, counters in self._read_counters().items()
        ]

    def count(self) -> int:
        """Return the bytes now allocated on the GPU with the most allocated bytes."""
        counts = (counters["allocated_bytes"]["all"]["current"] for counters in self._read_counters().values())
        return max(counts, default=0)

    @staticmethod
    def _read_counters() -> dict[torch.device, dict[str, Any]]:
        """Return the counters of each GPU in use, with one call per GPU.

        ``torch.cuda.max_memory_allocated`` and similar functions read, flatten and sort all counters for one number.
        """
        if not uses_gpus():
            return {}
        found = {gpu: torch.cuda.memory_stats_as_nested_dict(gpu) for gpu in list_gpus()}  # empty before CUDA begins
        return {
            gpu: counters
            for gpu, counters in found.items()
            if counters and counters["reserved_bytes"]["all"]["current"]
        }


def gather_memory(meter: GpuMeter) -> list[DeviceMemory]:
    """Return the peaks of all processes' GPUs; every process must call this function."""
    own = [json.dumps(asdict(device)) for device in meter.read()]
    return [DeviceMemory(**json.loads(told)) for told in gather_over_processes(own)]
