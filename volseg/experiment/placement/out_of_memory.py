"""Report what does not fit into memory: before a trial if sizes suffice, else with remedies."""

import gc
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.errors import ConfigError, OutOfMemoryError, VolsegError
from volseg.experiment.placement.placed_network import choose_device
from volseg.memory import total_bytes
from volseg.parallel.devices import count_gpus, count_launched, uses_gpus

SAYS_MEMORY = re.compile(
    r"\b(CUDA|Cuda|HIP|NCCL)\b.*out of memory"
    r"|can't allocate memory|not enough memory: you tried to allocate"
    r"|CU[A-Z]+_STATUS_\w*ALLOC\w*_FAILED"
    r"|Storage size calculation overflowed",
    re.DOTALL,
)
"""Messages of allocators and libraries whose exceptions have no class of their own: of main memory, of CUDA's driver
and of libraries. Other messages that mention memory do not match."""

FLOAT_BYTES = 4


@contextmanager
def explaining_memory(config: ExperimentConfig) -> Iterator[None]:
    """Turn an allocator's refusal within the block into one error with the attempted sizes and the remedies.

    Raises
    ------
    OutOfMemoryError
        With the sizes of the config, and the remedies, the cheapest first.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as fault:
        if isinstance(fault, VolsegError) or not is_out_of_memory(fault):
            raise
        attempt = describe_attempt(config, choose_device(config), fault)
        raise OutOfMemoryError(f"{attempt}. {describe_remedies(config)}") from fault


def free_memory() -> None:
    """Free the memory of a failed or tried training, once nothing refers to it."""
    gc.collect()  # models and autograd graphs have many reference cycles
    if uses_gpus():
        torch.cuda.empty_cache()


def require_plausible_sizes(config: ExperimentConfig, task: Task, device: torch.device) -> None:
    """Raise if a batch or a window, only as a network's input and output, exceeds the memory of all devices.

    Raises
    ------
    ConfigError
        Before a case is read, with the size and the memory.
    """
    devices = config.parallel.devices
    several = devices if isinstance(devices, int) else len(devices or ()) or count_gpus() or 1
    memory = _memory_of(device) * (max(count_launched(), several) if device.type == "cuda" else 1)
    channels = task.num_inputs + task.num_outputs
    batch = math.prod(config.patch.size) * config.patch.batch * channels * FLOAT_BYTES
    window = math.prod(config.inference.window or (0,)) * channels * FLOAT_BYTES
    for key, needed, value in (
        ("patch", batch, f"size {list(config.patch.size)} and batch {config.patch.batch}"),
        ("inference.window", window, str(list(config.inference.window or ()))),
    ):
        if needed > memory:
            raise ConfigError(
                f"{key}: {value} takes {needed / 2**30:.0f} GiB for a network's input and output without its layers, "
                f"and there are {memory / 2**30:.0f} GiB; choose a smaller one"
            )


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether an allocator of torch or of one of its libraries raised an exception."""
    if isinstance(fault, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(fault, RuntimeError) and SAYS_MEMORY.search(str(fault)) is not None


def describe_attempt(config: ExperimentConfig, device: torch.device, fault: BaseException) -> str:
    """Return the attempted sizes, and the message of the allocator."""
    window = config.inference.window
    reason = str(fault).partition("\n")[0].rstrip(".") or type(fault).__name__
    return (
        f"out of memory on {device}, which has {_memory_of(device) / 2**30:.1f} GiB ({reason}). Tried: patch.size "
        f"{list(config.patch.size)}, patch.batch {config.patch.batch}, inference.window "
        f"{'the whole volume' if window is None else list(window)}, inference.batch {config.inference.batch}"
    )


def describe_remedies(config: ExperimentConfig) -> str:
    """Return remedies that always take less memory, the cheapest first."""
    recomputed = {"all": ", parallel.checkpoint: tiled (and by tiles)", "tiled": ""}
    checkpoint = recomputed.get(str(config.parallel.checkpoint), ", parallel.checkpoint: all (recomputes activations)")
    return (
        "Take a smaller patch.batch, then a smaller patch.size (training) or inference.window (prediction), more GPUs "
        f"that share a volume (parallel.spatial){checkpoint}"
    )


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_bytes()
