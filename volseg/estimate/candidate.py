"""Describe a training step, list the ways to run it on some GPUs, and hold the estimate of each.

Candidates that cannot run are not listed: more replicas than samples, more slabs than planes, micro-batches larger than
the batch. Recomputation is never faster than the same candidate without it, so the list leaves it out; `relieve` adds
it where a candidate does not fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.estimate.step_memory import MemoryUse

Batch = Mapping[str, Tensor]
"""Fields with one row per sample."""

Step = Callable[[Batch], Any]
"""Forward, loss, backward and the optimizer's step, on a batch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A network and its training step; a trace of a candidate calls these functions under fake tensors.

    Each candidate calls them anew, on its own copy of the network, so candidates do not affect each other.
    """

    build: Callable[[], nn.Module]
    """Returns the plain network, in training mode. The network may be the user's, so a trace runs a fake copy."""
    shape: tuple[int, ...]
    """Shape of the image of a whole batch, (B, C, D, H, W)."""
    make_batch: Callable[[int, torch.device], Batch]
    """Makes a batch of this many rows on a device; ``image`` is the network's input."""
    build_optimizer: Callable[[nn.Module], Optimizer]
    """Returns the optimizer of the placed network, which is its argument."""
    build_step: Callable[[nn.Module, Optimizer], Step]
    """Makes the step of the placed network, and whatever else the step needs (an average of the weights)."""
    precision: torch.dtype
    """Type of the forward pass; ``build_step`` applies it."""
    validate: Callable[[nn.Module], object] | None = None
    """Runs the placed network as the validation between epochs does, on one batch of windows."""
    name: str = "the network"
    """Name of the network in messages."""

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.shape[0]

    @property
    def sides(self) -> tuple[int, ...]:
        """D, H, W of a volume."""
        return self.shape[2:]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to share a training step over GPUs, and to run it."""

    data: int = 1
    """Replicas of the network, which share the samples of a batch."""
    spatial: int = 1
    """Slabs of each volume."""
    pipeline: int = 1
    """Stages of the network, one per GPU."""
    split_size: int | None = None
    """Samples per micro-batch of a pipeline."""
    cuts: tuple[str, ...] | None = None
    """Dotted paths of the modules at which a pipeline's stages begin; by default chosen by the modules' times."""
    checkpoint: Literal["all", "tiled"] | int | None = None
    """Activations that are recomputed in backward: all, those of this many finest levels, or all, by tiles."""
    kernels: Literal["fast", "torch"] = "fast"
    recorded: bool = False
    """Whether the step is captured as one CUDA graph."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the candidate."""
        return self.data * self.spatial * self.pipeline

    def list_meshes(self) -> list[tuple[str, int]]:
        """Return the kinds of parallelism in use, named as in a config, each with its number of GPUs."""
        counts = {"data": self.data, "spatial": self.spatial, "pipeline": self.pipeline}
        return [(name, count) for name, count in counts.items() if count > 1]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory and time of a candidate; ``memory`` is that of the device that needs most."""

    candidate: Candidate
    memory: MemoryUse | None = None
    """Memory of the fullest GPU; None if the candidate cannot run; ``refused`` has the reason."""
    stages: tuple[MemoryUse, ...] = ()
    """Memory of each stage of a pipeline, in order."""
    seconds: float | None = None
    """Seconds of one optimizer step."""
    host_forward_seconds: float | None = None
    """Seconds that Python takes to launch the kernels of the forward pass; 0 if they are replayed."""
    refused: str | None = None
    """Reason why the candidate cannot run or does not fit."""
    more_than: int | None = None
    """Lower bound on the bytes of a GPU, if the trace stopped early because the candidate does not fit; else None."""

    @property
    def runs(self) -> bool:
        """Whether the candidate can run and fits."""
        return self.refused is None

    @property
    def needed(self) -> int:
        """Bytes of a GPU that the candidate needs, if its memory is known."""
        assert self.memory is not None
        return self.memory.total


LEVELS = (1, 2, 3, "all", "tiled")
"""Levels of recomputation, least first: this many of the finest levels, all, or all by tiles. Each level of a network
has an eighth of the voxels of the next finer level, so a fourth level would save next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """The open settings of a search; a number fixes a setting in advance."""

    data: int | None = None
    spatial: int | None = None
    pipeline: int | None = None
    split_size: int | None = None
    checkpoint: Literal["all", "tiled"] | int | None = None
    kernels: tuple[Literal["fast", "torch"], ...] = ("torch",)
    """Kernels of a network on one GPU without recomputation: the first choice, then the fallback. Cut volumes always
    use the fast kernels."""
    records: bool = True
    """Whether to record a step that can be recorded."""
    whole: bool = False
    """Whether to cut neither volumes nor the network."""
    one_process: bool = False
    """Whether one process drives all GPUs: then there are no replicas."""


def list_candidates(num_gpus: int, batch_size: int, sides: Sequence[int], free: Freedom) -> list[Candidate]:
    """Return the candidates on one GPU, on ``num_gpus``, or on fewer GPUs if a batch has fewer samples.

    Parameters
    ----------
    num_gpus : int
        Number of GPUs.
    batch_size : int
        Samples of a step.
    sides : sequence of int
        D, H, W of a volume.
    free : Freedom
        Open and fixed settings.

    Examples
    --------
    >>> [name_candidate(each) for each in list_candidates(2, 4, (64, 64, 64), Freedom())]
    ['one GPU', 'data: 2', 'spatial: 2', 'pipeline: 2, split_size: 1', 'pipeline: 2, split_size: 2']
    """
    meshes = sorted(
        _list_meshes(num_gpus, batch_size, max(sides), free),
        key=lambda mesh: (mesh != (1, 1, 1), mesh[2], mesh[1]),  # fewest cuts first
    )
    return [candidate for mesh in meshes for candidate in _list_ways(*mesh, batch_size, free)]


def _list_meshes(num_gpus: int, batch_size: int, planes: int, free: Freedom) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of replicas, slabs and stages of each mesh that agrees with ``free``."""
    most_data = 1 if free.one_process else min(num_gpus, batch_size)
    decided = free.data is not None or free.spatial is not None or free.pipeline is not None
    for data in range(1, most_data + 1):
        for spatial in range(1, min(num_gpus // data, planes) + 1):
            for pipeline in range(1, num_gpus // (data * spatial) + 1):
                count = data * spatial * pipeline
                cuts_both = spatial > 1 and pipeline > 1
                asked = all(
                    wanted is None or wanted == got
                    for wanted, got in ((free.data, data), (free.spatial, spatial), (free.pipeline, pipeline))
                )
                uses_all = count == num_gpus or (data == most_data and count == data)
                alone = count == 1 and not decided
                # Stages of a replica with one sample wait for each other: only on request.
                idle = data > 1 and pipeline > 1 and batch_size < 2 * data and free.pipeline is None
                refused = cuts_both or idle or (free.whole and spatial * pipeline > 1)
                if asked and not refused and (uses_all or alone):
                    yield data, spatial, pipeline


def _list_ways(data: int, spatial: int, pipeline: int, batch_size: int, free: Freedom) -> Iterator[Candidate]:
    """Yield the candidates of a mesh."""
    # A step is recorded on one GPU of each process; a pipeline records its stages.
    records = free.records and not (free.one_process and spatial > 1)
    mesh = Candidate(data=data, spatial=spatial, pipeline=pipeline, recorded=records)
    if pipeline > 1:
        own = -(-batch_size // data)
        sizes = [2**power for power in range(own.bit_length()) if 2**power < own] or [1]
        if free.split_size is not None:
            sizes = [min(free.split_size, own)]
        for size in sizes:
            yield replace(mesh, split_size=size, kernels="torch")
    elif spatial > 1 or free.checkpoint is not None:
        yield replace(mesh, kernels="fast", checkpoint=free.checkpoint)
    else:
        yield replace(mesh, kernels=free.kernels[0])


def relieve(candidate: Candidate, free: Freedom) -> list[Candidate]:
    """Return alternatives to a candidate that does not fit: the same candidate with increasing recomputation.

    Recomputation runs the same kernels, and some of them twice, so no alternative is faster than a candidate that fits.

    Examples
    --------
    >>> [name_candidate(each) for each in relieve(Candidate(spatial=2), Freedom())][:2]
    ['spatial: 2, checkpoint: 1', 'spatial: 2, checkpoint: 2']
    """
    if candidate.pipeline > 1 or candidate.checkpoint is not None or free.checkpoint is not None:
        return []
    return [replace(candidate, checkpoint=level, kernels="fast") for level in LEVELS]  # type: ignore[arg-type]


def name_candidate(candidate: Candidate, *, kernels: bool = False) -> str:
    """Return the name of a candidate, in the keys of a config."""
    parts = [f"{name}: {count}" for name, count in candidate.list_meshes()] or ["one GPU"]
    if candidate.split_size is not None:
        parts.append(f"split_size: {candidate.split_size}")
    if candidate.checkpoint is not None:
        parts.append(f"checkpoint: {candidate.checkpoint}")
    if kernels:
        parts.append(f"{candidate.kernels} kernels")
    return ", ".join(parts)
