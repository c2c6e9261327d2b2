"""Choose the axes along which a volume is cut, and the planes of each shard: pure arithmetic.

The layout of a volume depends only on its size and on the number of shards. Two volumes of one size are therefore
always cut in the same way, and an encoder's skip meets the decoder without moving a plane. Only a volume whose cut dim
was merged with its neighbours (``view(B, -1)``) has another layout, which it states: see ``Merged``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from volseg.device.layout import DIM
from volseg.errors import ParallelError

Span = tuple[int, int]
"""First plane and one past the last."""


class Merged(NamedTuple):
    """Dims merged with a cut dim: ``outer`` entries in front of the planes, and ``unit`` in each plane.

    The extent is ``outer * planes * unit``. A shard owns its planes of each outer entry, with all units.
    """

    outer: int
    unit: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move of planes ``start`` to ``stop`` from shard ``source`` to shard ``target``, where they begin at ``place``."""

    source: int
    target: int
    start: int
    stop: int
    place: int


def bounds(size: int, num_shards: int) -> tuple[int, ...]:
    """Return the ``num_shards + 1`` borders between slabs of ``size`` planes; slabs differ by one plane at most.

    Examples
    --------
    >>> bounds(10, 4)
    (0, 2, 5, 7, 10)
    """
    return tuple(index * size // num_shards for index in range(num_shards + 1))


def spans(size: int, num_shards: int, unit: int = 1) -> list[Span]:
    """Return the planes that each shard owns; ``unit`` of them stay together."""
    borders = bounds(size // unit, num_shards)
    return list(pairwise(unit * border for border in borders))


def can_split(size: int, num_shards: int) -> bool:
    """Return whether every shard gets a plane; a volume that is too thin is kept whole."""
    return size >= num_shards


def overlap(first: Span, second: Span) -> Span:
    """Return the planes in both spans; an empty span is returned as ``(start, start)``."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return start, max(start, stop)


def transfers(size: int, wanted: Sequence[Span], unit: int = 1) -> list[Transfer]:
    """Return every movement of planes, by target and then by position, that gives each shard its wanted planes.

    Planes that a shard already owns are included (source equals target), so that the pieces of one target, in order,
    are its wanted span. A span that exceeds one end of the volume continues at the other end, as in ``[-3, 2)``; then
    ``unit`` planes stay together.
    """
    owned = spans(size, len(wanted), unit)
    moves = []
    for target, (first, last) in enumerate(wanted):
        for turn in (-size, 0, size):  # start of a copy of the volume
            for source, own in enumerate(owned):
                start, stop = overlap((first - turn, last - turn), own)
                if start < stop:
                    moves.append(Transfer(source, target, start, stop, start + turn - first))
    return moves


@dataclass(frozen=True)
class Fetch:
    """Planes of a volume that the shards on a line of the grid need.

    Attributes
    ----------
    axis
        Mesh axis that cuts the volume.
    dim
        Tensor dim that it cuts.
    size
        Planes of the whole volume along ``dim``.
    wanted
        One span for each position on the mesh axis, possibly empty; a span that exceeds one end of the volume continues
        at the other (see ``transfers``).
    unit
        Number of planes that stay together (see ``spans``).
    """

    axis: int
    dim: int
    size: int
    wanted: Sequence[Span]
    unit: int = 1

    @cached_property
    def owned(self) -> list[Span]:
        """Planes of each shard."""
        return spans(self.size, len(self.wanted), self.unit)

    @cached_property
    def moves(self) -> list[Transfer]:
        """Every movement."""
        return transfers(self.size, self.wanted, self.unit)

    @property
    def stays(self) -> bool:
        """Whether no planes change shards."""
        return all(move.source == move.target for move in self.moves)

    def own_span(self, position: int) -> Span | None:
        """Return the first and the number of the own planes that a shard needs; None for all of them."""
        own, (start, stop) = self.owned[position], self.wanted[position]
        return None if own == (start, stop) else (start - own[0] if stop > start else 0, stop - start)


AXES = {"D": -3, "H": -2, "W": -1}

THICK = 16
"""Planes per shard from which a volume is cut along D even if H or W is longer. Only halos along D are received in
place: a step of 128 x 256 x 256 voxels on two GPUs took 68 ms cut along H, and 64 x 256 x 256 take 25 on one."""


def check_axes(axes: Sequence[str] | None, grid: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the axes to cut, one per axis of the grid; None where each volume's size decides.

    Raises
    ------
    ParallelError
        If they are not different axes of D, H, W, one per axis of the grid.
    """
    if axes is None:
        return None
    chosen = tuple(axes)
    if len(chosen) != len(grid) or len(set(chosen)) != len(chosen) or not set(chosen) <= set(AXES):
        raise ParallelError(
            f"axes must name {len(grid)} different ones of D, H, W (one per axis of grid {grid}), got {axes!r}"
        )
    return chosen


def choose_dims(shape: Sequence[int], axes: Sequence[str] | None, grid: Sequence[int]) -> list[int] | None:
    """Return the dim that each mesh axis cuts, or None for a volume too thin to cut."""
    if axes is not None:
        dims = [len(shape) + AXES[axis] for axis in axes]
    else:
        # The longest dim has the thinnest halo relative to its slab; of equal dims the first has contiguous slabs.
        spatial = sorted(range(2, len(shape)), key=lambda dim: -shape[dim])
        dims = sorted(spatial[: len(grid)])
        if len(grid) == 1 and len(shape) == 5 and shape[DIM] >= THICK * grid[0]:
            dims = [DIM]
    if all(can_split(shape[dim], count) for dim, count in zip(dims, grid, strict=True)):
        return dims
    return None
