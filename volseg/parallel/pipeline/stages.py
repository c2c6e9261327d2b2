"""Choose the number of devices and the layers of each from measured costs; nothing is moved.

More stages are not always faster: with few micro-batches the copies between stages outweigh the gain, and a layer that
takes a third of the time by itself cannot be divided. So every number of stages is predicted, and devices stay idle if
they would not help; the partition reports this.
"""

import gc
import logging
from collections.abc import Sequence
from itertools import accumulate

import torch

from volseg.device.gpus import count_free_bytes, empty_cache, is_gpu
from volseg.errors import PartitionError
from volseg.parallel.pipeline.balance import (
    UNLIMITED,
    balance,
    balance_stages,
    choose_quickest,
    compute_held_bytes,
    list_held,
    predict_ms,
    sum_runs,
)
from volseg.parallel.pipeline.costs import Measured
from volseg.parallel.pipeline.partition import LayerCost, Partition

logger = logging.getLogger(__name__)

# Parameter, gradient, and Adam's two moments.
STATE_COPIES = 4

# A copy between two H200 took 13 us, and 390 GB/s; the host's part takes longer.
COPY_MS = 0.05
COPY_BYTES_PER_MS = 200e6


def plan_stages(
    measured: Measured,
    devices: Sequence[torch.device],
    samples: int,
    micro_batches: int,
    limits: Sequence[float],
    is_recorded: bool,
) -> Partition:
    """Choose the fastest number of stages, and for it the fastest cut that fits.

    Parameters
    ----------
    measured
        Layers of one micro-batch.
    devices
        In the order of the stages.
    samples, micro_batches
        Samples of the measured micro-batch, and the number of micro-batches per batch.
    limits
        Bytes available on each device.
    is_recorded
        Whether batches will be replayed, which takes more memory.
    """
    layers = measured.layers
    forward, backward = [layer.forward_ms for layer in layers], [layer.backward_ms for layer in layers]
    held = compute_held_bytes(measured.activations, len(layers), is_recorded)
    memory = sum_runs([STATE_COPIES * layer.parameter_bytes for layer in layers]) + micro_batches * held
    most = min(len(devices), len(layers))
    cuts: dict[int, list[int]] = {}
    predicted: dict[int, float] = {}
    for stages in range(1, most + 1):
        try:
            cuts[stages] = balance(forward, stages, backward, memory, limits[:stages])
        except PartitionError as refused:
            failure = refused
            continue
        phases = list_held(sum_runs(forward), cuts[stages]), list_held(sum_runs(backward), cuts[stages])
        copies = _predict_copies_ms(layers, cuts[stages]) if is_gpu(devices[0]) else 0.0
        predicted[stages] = predict_ms(*phases, micro_batches, copies)
    if predicted:
        lengths = cuts[choose_quickest(predicted)]
    else:
        # An estimate must not forbid a batch that may fit: even memory out and let the device decide.
        logger.warning("%s; cutting for even memory", failure)
        lengths = balance_stages(memory, most)
    of_stages, notes = list_held(held, lengths), []
    if idle := len(devices) - len(lengths):
        times = ", ".join(f"{stages}: {ms:.3f}" for stages, ms in predicted.items())
        notes = [
            f"{idle} of {len(devices)} devices stay idle: the network has {len(layers)} separable layers; predicted ms "
            f"of a batch by number of stages, if they fit into memory: {times or 'none'}"
        ]
    return Partition.from_lengths(
        layers, lengths, devices, of_stages, samples=samples, notes=tuple(notes), predicted_ms=predicted
    )


def _predict_copies_ms(layers: Sequence[LayerCost], lengths: Sequence[int]) -> float:
    """Return the time of one micro-batch's copies between all stages."""
    return sum(COPY_MS + layers[end - 1].sent_bytes / COPY_BYTES_PER_MS for end in accumulate(lengths[:-1]))


def read_memory_limits(devices: Sequence[torch.device]) -> list[float]:
    """Return the bytes available on each device; hosts have no limit."""
    if not all(map(is_gpu, devices)):
        return [UNLIMITED] * len(devices)
    # Cached memory of the measurement is available.
    gc.collect()
    for device in devices:
        empty_cache(device)
    # Stages share a device that is named several times.
    return [count_free_bytes(device) / list(devices).count(device) for device in devices]
