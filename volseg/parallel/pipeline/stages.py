"""Choose the number of devices and the layers of each from measured costs; nothing is moved.

More stages are not always faster: with few micro-batches the copies between stages outweigh the gain, and a layer that
takes a third of the time by itself cannot be divided. So every number of stages is predicted, and devices stay idle if
they would not help; the partition reports this.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from volseg.device.gpus import count_free_bytes, empty_cache, is_gpu
from volseg.errors import PartitionError
from volseg.parallel.pipeline.balance import (
    EVEN,
    Held,
    balance,
    balance_stages,
    choose_quickest,
    compute_held_bytes,
    list_held,
    measure_unevenness,
    predict_ms,
    sum_runs,
)
from volseg.parallel.pipeline.costs import Measured
from volseg.parallel.pipeline.partition import LayerCost

logger = logging.getLogger(__name__)

# Parameter, gradient, and Adam's two moments.
STATE_COPIES = 4

# A copy between two H200 took 13 us, and 390 GB/s; the host's part takes longer.
COPY_MS = 0.05
COPY_BYTES_PER_MS = 200e6


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A cut, and the predicted time of a batch."""

    measured: Measured
    lengths: tuple[int, ...]
    """Layers of each stage."""
    predicted_ms: dict[int, float]
    """Time of a batch, by the number of stages that fit into the devices' memory."""
    num_devices: int
    """Number of available devices."""
    held: Sequence[float]
    """Activations of one micro-batch on each stage, in bytes."""
    memory_note: str = ""
    """Reason why one device holds much more than the others, if it does."""

    @property
    def ms(self) -> float:
        """Time of a batch for the chosen cut; infinite if memory may not suffice."""
        return self.predicted_ms.get(len(self.lengths), float("inf"))

    @property
    def note(self) -> str:
        """Reason for idle devices."""
        stages = len(self.lengths)
        if stages == self.num_devices:
            return ""
        most = max(self.predicted_ms, default=stages)
        if most == stages:
            return f"{self.num_devices - stages} of {self.num_devices} devices idle: only {stages} layers separate"
        return (
            f"{self.num_devices - stages} of {self.num_devices} devices idle: a batch should take "
            f"{self.predicted_ms[most]:.3f} ms on {most}, {self.predicted_ms[stages]:.3f} ms on {stages}"
        )


def plan_stages(
    measured: Measured,
    devices: Sequence[torch.device],
    micro_batches: int,
    limits: Sequence[float] | None,
    is_recorded: bool,
) -> StagePlan:
    """Choose the fastest number of stages, and for it the fastest cut that fits.

    Parameters
    ----------
    measured
        Layers of one micro-batch.
    devices
        In the order of the stages.
    micro_batches
        Number per batch.
    limits
        Bytes available on each device.
    is_recorded
        Whether batches will be replayed, which takes more memory.
    """
    layers = measured.layers
    forward, backward = [layer.forward_ms for layer in layers], [layer.backward_ms for layer in layers]
    held = compute_held_bytes(measured.activations, len(layers), is_recorded)
    states = sum_runs([STATE_COPIES * layer.parameter_bytes for layer in layers])
    memory = [
        [fixed + micro_batches * each for fixed, each in zip(*rows, strict=True)]
        for rows in zip(states, held, strict=True)
    ]
    cuts: dict[int, list[int]] = {}
    predicted: dict[int, float] = {}
    failure: PartitionError | None = None
    for stages in range(1, min(len(devices), len(layers)) + 1):
        try:
            cuts[stages] = balance(forward, stages, backward, memory, None if limits is None else limits[:stages])
        except PartitionError as refused:
            failure = refused
            continue
        phases = list_held(sum_runs(forward), cuts[stages]), list_held(sum_runs(backward), cuts[stages])
        copies = _predict_copies_ms(layers, cuts[stages]) if is_gpu(devices[0]) else 0.0
        predicted[stages] = predict_ms(*phases, micro_batches, copies)
    if predicted:
        lengths = tuple(cuts[choose_quickest(predicted)])
        note = _describe_memory(memory, lengths)
        return StagePlan(measured, lengths, predicted, len(devices), list_held(held, lengths), note)
    # An estimate must not forbid a batch that may fit: even memory out and let the device decide.
    logger.warning("%s; cutting for even memory", failure)
    lengths = tuple(balance_stages(memory, min(len(devices), len(layers))))
    return StagePlan(measured, lengths, {}, len(devices), list_held(held, lengths))


def _describe_memory(memory: Held, lengths: Sequence[int]) -> str:
    """Describe uneven memory."""
    stages, ratio = list_held(memory, lengths), measure_unevenness(memory, lengths)
    if ratio <= EVEN:
        return ""
    return (
        f"stage {stages.index(max(stages))} holds {max(stages) / 2**30:.2f} GiB with parameters and optimizer, "
        f"{ratio:.2f} times the mean"
    )


def _predict_copies_ms(layers: Sequence[LayerCost], lengths: Sequence[int]) -> float:
    """Return the time of one micro-batch's copies between all stages."""
    return sum(COPY_MS + layers[end - 1].sent_bytes / COPY_BYTES_PER_MS for end in accumulate(lengths[:-1]))


def read_memory_limits(devices: Sequence[torch.device]) -> list[float] | None:
    """Return the bytes available on each device, or ``None`` for hosts."""
    if not all(map(is_gpu, devices)):
        return None
    # Cached memory of the measurement is available.
    gc.collect()
    for device in devices:
        empty_cache(device)
    # Stages share a device that is named several times.
    return [count_free_bytes(device) / list(devices).count(device) for device in devices]
