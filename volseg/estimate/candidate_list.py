"""Which ways there are to run a training step on some GPUs: pure, on numbers alone.

What cannot be run at all is not listed: more replicas than samples, more slabs than planes, micro-batches larger than
the batch. What is no faster than another of the list whatever the network is (recomputation where memory suffices) is
not listed either, but comes behind that other one: see `relieve`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from volseg.estimate.candidate import Candidate

__all__ = ["Freedom", "list_candidates", "name_candidate", "relieve"]

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
