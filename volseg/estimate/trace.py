"""The events of a training step on one device, in order: memory, kernels, and data sent to other devices."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block of memory is allocated."""

    block: int
    """Number of the block, unique within the trace."""
    size: int
    """Requested bytes."""
    stream: int = 0
    """Stream of the block; 0 is the device's default stream."""
    pool: str = ""
    """Name of the recording whose private pool the block comes from; empty for the shared pool."""


@dataclass(frozen=True, slots=True)
class Free:
    """A block is freed."""

    block: int


@dataclass(frozen=True, slots=True)
class Used:
    """A second stream works on a block: the block becomes free only when that stream has reached this point."""

    block: int


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel, or an operator of torch, runs."""

    name: str
    """Torch's name of the operator (``aten.convolution``), or the function name of one of volseg's kernels."""
    dtype: torch.dtype
    """Type in which the kernel computes."""
    flops: int
    """Multiplications and additions, two for each multiply-add."""
    bytes_moved: int
    """Bytes read and written; each tensor counts once."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the kernel's tensors, inputs first."""
    channels_last: bool = False
    """Whether the first input has its channels last in memory."""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """Data travel between devices."""

    kind: str
    """``halo``, ``all_reduce``, ``all_gather``, ``all_to_all``, ``broadcast`` or ``copy``."""
    size: int
    """Bytes that this device sends."""
    devices: int
    """Number of devices that take part."""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the step begins.

    ``placed``, ``step``, ``forward``, ``loss``, ``backward``, ``optimizer``, ``record``, ``replay``, ``end``;
    ``empty_cache`` where cached memory is returned to the device, ``record_pipeline`` where a pipeline begins to
    record, ``validate`` after the steps.
    """

    name: str


Event = Allocate | Free | Used | KernelRun | Sent | Mark


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The events of one device."""

    events: tuple[Event, ...]
    device: int = 0
    """Index of the device within the strategy."""
