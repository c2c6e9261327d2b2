"""Ways to run a training step on some GPUs, and what is estimated of one: pure, on numbers alone.

What cannot be run at all is not listed: more replicas than samples, more slabs than planes, micro-batches larger than
the batch. What is no faster than another of the list whatever the network is (recomputation where memory suffices) is
not listed either, but comes behind that other one: see `relieve`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from volseg.estimate.step_memory import MemoryUse

__all__ = ["Candidate", "Estimate", "Freedom", "list_candidates", "name_candidate", "relieve"]


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


LEVELS = (1, 2, 3, "all", "tiled")
"""Activations that are recomputed, fewer first: those of so many of the finest levels, all, or all and by tiles. Every
level of a network holds an eighth of the voxels of the one above it, so that the fourth one adds next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """What may be chosen; a number says what was decided already."""

    data: int | None = None
    spatial: int | None = None
    pipeline: int | None = None
    split_size: int | None = None
    checkpoint: Literal["all", "tiled"] | int | None = None
    kernels: tuple[Literal["fast", "torch"], ...] = ("torch",)
    """Of a network on one GPU that recomputes nothing: those that are taken, then those that it falls back to. Where
    volumes are cut it is always the fast ones."""
    records: bool = True
    """Whether a step that can be recorded is."""
    whole: bool = False
    """Whether neither volumes nor the network are cut."""
    one_process: bool = False
    """Whether one process has all GPUs: then there are no replicas."""


def list_candidates(num_gpus: int, batch_size: int, sides: Sequence[int], free: Freedom) -> list[Candidate]:
    """Return who may compute what, on one GPU, or on ``num_gpus``, or on fewer where a batch has fewer samples.

    Parameters
    ----------
    num_gpus : int
        There are.
    batch_size : int
        Samples of a step.
    sides : sequence of int
        D, H, W of a volume.
    free : Freedom
        What is left open.

    Examples
    --------
    >>> [name_candidate(each) for each in list_candidates(2, 4, (64, 64, 64), Freedom())]
    ['one GPU', 'data: 2', 'spatial: 2', 'pipeline: 2, split_size: 1', 'pipeline: 2, split_size: 2']
    """
    meshes = sorted(
        _list_meshes(num_gpus, batch_size, max(sides), free),
        key=lambda mesh: (mesh != (1, 1, 1), mesh[2], mesh[1]),  # what cuts least comes first
    )
    return [candidate for mesh in meshes for candidate in _list_ways(*mesh, batch_size, free)]


def _list_meshes(num_gpus: int, batch_size: int, planes: int, free: Freedom) -> Iterator[tuple[int, int, int]]:
    """Give replicas, slabs and stages of each mesh that goes with what was decided."""
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
                # Stages of a replica that gets one sample wait for each other: for who asks for it.
                idle = data > 1 and pipeline > 1 and batch_size < 2 * data and free.pipeline is None
                refused = cuts_both or idle or (free.whole and spatial * pipeline > 1)
                if asked and not refused and (uses_all or alone):
                    yield data, spatial, pipeline


def _list_ways(data: int, spatial: int, pipeline: int, batch_size: int, free: Freedom) -> Iterator[Candidate]:
    """Give the ways in which a mesh can be run."""
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
    """Return what to take where a candidate does not fit: the same with more and more activations recomputed.

    Recomputation runs the same kernels and some of them twice: where the candidate fits, none of these is faster.

    Examples
    --------
    >>> [name_candidate(each) for each in relieve(Candidate(spatial=2), Freedom())][:2]
    ['spatial: 2, checkpoint: 1', 'spatial: 2, checkpoint: 2']
    """
    if candidate.pipeline > 1 or candidate.checkpoint is not None or free.checkpoint is not None:
        return []
    return [replace(candidate, checkpoint=level, kernels="fast") for level in LEVELS]  # type: ignore[arg-type]


def name_candidate(candidate: Candidate, *, kernels: bool = False) -> str:
    """Return a candidate in the words of a config."""
    parts = [
        f"{name}: {count}"
        for name, count in (("data", candidate.data), ("spatial", candidate.spatial), ("pipeline", candidate.pipeline))
        if count > 1
    ] or ["one GPU"]
    if candidate.split_size is not None:
        parts.append(f"split_size: {candidate.split_size}")
    if candidate.checkpoint is not None:
        parts.append(f"checkpoint: {candidate.checkpoint}")
    if kernels:
        parts.append(f"{candidate.kernels} kernels")
    return ", ".join(parts)
