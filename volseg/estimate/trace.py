"""What a device is asked for in a step, in order: memory, kernels, and data on their way to other devices."""

from dataclasses import dataclass

import torch

__all__ = ["Allocate", "Event", "Free", "KernelRun", "Mark", "Sent", "StepTrace", "Used"]


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block of memory is taken."""

    block: int
    """Number of the block, which no other of the trace has."""
    size: int
    """Bytes that were asked for."""
    stream: int = 0
    """Stream it belongs to; 0 is the device's default one."""
    pool: str = ""
    """Recording whose own memory it is taken from; empty for the memory that everything shares."""


@dataclass(frozen=True, slots=True)
class Free:
    """A block is given back."""

    block: int


@dataclass(frozen=True, slots=True)
class Used:
    """A stream that is not a block's own works on it: the block comes back only when that stream has come here."""

    block: int


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel, or an operator of torch, runs."""

    name: str
    """As torch names the operator (``aten.convolution``), or the function of a kernel of our own."""
    dtype: torch.dtype
    """In which it computes."""
    flops: int
    """Multiplications and additions, two for each multiply-add."""
    bytes_moved: int
    """Read and written, each tensor once."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensors, inputs first."""
    channels_last: bool = False
    """Whether the channels of its first input are last in memory."""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """Data travel between devices."""

    kind: str
    """``halo``, ``all_reduce``, ``all_gather``, ``all_to_all``, ``broadcast`` or ``copy``."""
    size: int
    """Bytes that this device sends."""
    devices: int
    """That take part."""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the step begins.

    ``placed``, ``step``, ``forward``, ``loss``, ``backward``, ``optimizer``, ``record``, ``replay``, ``end``;
    ``empty_cache`` where what is cached is given back to the device, ``record_pipeline`` where a pipeline begins to
    record, ``validate`` after the steps.
    """

    name: str


Event = Allocate | Free | Used | KernelRun | Sent | Mark


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one device is asked for."""

    events: tuple[Event, ...]
    device: int = 0
    """Number of the device among those of the strategy."""
