"""A way to run a training step over devices, and what is forecast of it."""

from dataclasses import dataclass
from typing import Literal

from volseg.estimate.allocator import MemoryUse

__all__ = ["Candidate", "Estimate"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Who computes what, and how."""

    data: int = 1
    """Replicas of the network, which share the samples of a batch."""
    spatial: int = 1
    """Slabs of each volume."""
    pipeline: int = 1
    """Stages of the network, each on a GPU."""
    split_size: int | None = None
    """Samples per micro-batch of a pipeline."""
    cuts: tuple[str, ...] | None = None
    """Where a pipeline's stages begin, as dotted module paths; by default where their times say."""
    checkpoint: Literal["all", "tiled"] | int | None = None
    """Activations that are computed again in backward: all, those of that many finest levels, or all, by tiles."""
    kernels: Literal["fast", "torch"] = "fast"
    recorded: bool = False
    """Whether the step is one CUDA graph."""

    @property
    def num_gpus(self) -> int:
        """Devices that it takes."""
        return self.data * self.spatial * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a candidate needs; ``memory`` is that of the device that needs most."""

    candidate: Candidate
    memory: MemoryUse | None = None
    """None where it cannot run at all; ``refused`` says why."""
    devices: tuple[MemoryUse, ...] = ()
    """Of every device: process after process, stage after stage; none where ``memory`` is None."""
    seconds: float | None = None
    """Of one optimizer step."""
    host_seconds: float | None = None
    """Of these, those that Python takes to start what is not replayed."""
    host_forward_seconds: float | None = None
    """Of these, those of the forward pass."""
    refused: str | None = None
    """Why it cannot run, or does not fit."""
    more_than: int | None = None
    """Bytes of a GPU that it needs more than, where it was given up on the way since it does not fit; else None."""

    @property
    def runs(self) -> bool:
        """Whether it fits and nothing refuses it."""
        return self.refused is None
