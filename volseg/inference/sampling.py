"""Map the voxels of one grid to the neighbouring voxels of another grid, and interpolate there.

Every voxel of the target has one *cell*: the source voxel at or before it along each axis. A box of cells needs only
the source voxels of that box and the planes after it. So boxes that cover the source give every voxel of the target its
value exactly once. The value does not depend on the part of the source in memory: positions and weights are computed in
float64 for the whole grid.

Grids with parallel, permuted or flipped axes need a small table per axis. Oblique grids need a position per voxel:
Spacing turns a sheared image (a tilted gantry) into one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from volseg.errors import GridError
from volseg.transforms.grid import TIE, Grid

WHOLE_VOXEL = 0.01
"""A map that differs by less than this (voxels) from permutation, flip, scaling and whole shift is treated as such."""

Box = tuple[range, range, range]
"""Voxels or cells along three axes."""

Place = tuple[slice, slice, slice] | tuple[Tensor, Tensor, Tensor]
"""Voxels of the target: a box, or a list."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The part of a volume that is in memory: voxel i of an axis is at index ``(i - origin) % side``."""

    values: Tensor
    """``(K, d, h, w)``."""
    origin: tuple[int, int, int] = (0, 0, 0)

    def locate(self, axis: int, voxels: Tensor) -> Tensor:
        """Return the indices along dim ``axis + 1`` of voxels of the source."""
        return (voxels - self.origin[axis]) % self.values.shape[axis + 1]


def locate_planes(planes: range, depth: int) -> list[slice]:
    """Return the slices of planes in a ring of ``depth``: one piece, or two around its end."""
    if not planes:
        return []
    start = planes.start % depth
    stop = start + len(planes)
    return [slice(start, stop)] if stop <= depth else [slice(start, depth), slice(0, stop - depth)]


@dataclass(frozen=True, slots=True, eq=False)
class AxisTable:
    """Source neighbours of the target's voxels along one axis."""

    source: int
    """The parallel axis of the source, in either direction."""
    inside: range
    """Voxels of the target that the source covers."""
    below: Tensor
    """Source voxel at or before each voxel of the target (int64)."""
    above: Tensor
    """The next source voxel, or the same at the border (int64)."""
    weight: Tensor | None
    """Weight of ``above``, in [0, 1] (float32); None if each voxel coincides with a source voxel."""

    def find(self, cells: range) -> range:
        """Return the voxels of the target with cells in a range of the source."""
        start, stop = self.inside.start, self.inside.stop
        below = self.below[start:stop]
        found = ((below >= cells.start) & (below < cells.stop)).nonzero()
        # Cells increase or decrease along the axis, so that those of a range are adjacent.
        return range(start + int(found[0]), start + int(found[-1]) + 1) if len(found) else range(0)


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Sampling between grids with the same axes, in any order and direction: one table per axis of the target."""

    tables: tuple[AxisTable, AxisTable, AxisTable]

    def find(self, cells: Box) -> Box:
        """Return the voxels of the target with cells in the box."""
        d, h, w = (table.find(cells[table.source]) for table in self.tables)
        return d, h, w

    def read(self, held: Held, cells: Box, most_elements: int) -> Iterator[tuple[Place, Tensor]]:
        """Yield boxes of the target with cells in the box, and the values there ``(K, ...)``.

        A step keeps at most about ``most_elements`` values in memory. Voxels outside the source have no cell.
        """
        found = self.find(cells)
        # A source finer than the target reads more planes than it returns.
        sides = [len(cells[table.source]) for table in self.tables]
        wider = math.prod(max(1.0, side / max(1, len(part))) for side, part in zip(sides, found, strict=True))
        for box in split_box(found, int(most_elements / (len(held.values) * wider))):
            d, h, w = (slice(part.start, part.stop) for part in box)
            yield (d, h, w), self.interpolate(held, box)

    def interpolate(self, held: Held, box: Box) -> Tensor:
        """Return the values at a box of the target, one axis after the other, d first."""
        values = held.values.permute(0, *(table.source + 1 for table in self.tables))
        needed = []
        for dim, (table, part) in enumerate(zip(self.tables, box, strict=True), 1):
            below, above = (of[part.start : part.stop] for of in (table.below, table.above))
            first = int(min(below[0], below[-1]))
            planes = torch.arange(first, int(max(above[0], above[-1])) + 1)
            values = _select(values, dim, held.locate(table.source, planes))
            needed.append((below - first, above - first))
        if any(table.weight is not None for table in self.tables):
            values = values.float()
        for dim, (table, part, (below, above)) in enumerate(zip(self.tables, box, needed, strict=True), 1):
            if table.weight is None:
                values = _select(values, dim, below)
                continue
            sides = [-1 if other == dim else 1 for other in range(4)]
            of_above = table.weight[part.start : part.stop].to(values.device).view(sides)
            # Products and a sum: a fused product would round differently at the ends of a row, and so would depend on
            # the box.
            lower = values.index_select(dim, below.to(values.device)).mul_(1 - of_above)
            values = lower.add_(values.index_select(dim, above.to(values.device)).mul_(of_above))
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Oblique:
    """Sampling between any two grids: a position is computed for each voxel of the target."""

    to_source: Tensor
    target: tuple[int, int, int]
    source: tuple[int, int, int]

    def read(self, held: Held, cells: Box, most_elements: int) -> Iterator[tuple[Place, Tensor]]:
        """Yield lists of voxels of the target and the values there, as `Aligned.read`."""
        # Positions, their cells and the eight corners take as much memory as some forty more classes.
        for box in split_box(self._bound(cells), most_elements // (len(held.values) + 40)):
            axes = [torch.arange(part.start, part.stop, device=held.values.device) for part in box]
            positions, chosen = self._place(axes, cells)
            if not len(chosen[0]):
                continue
            place = tuple(axis[index] for axis, index in zip(axes, chosen, strict=True))
            yield (place[0], place[1], place[2]), self._interpolate(held, [at[chosen] for at in positions])

    def _bound(self, cells: Box) -> Box:
        """Return a box of the target that contains all voxels with cells in ``cells``."""
        ends = []
        for part, side in zip(cells, self.source, strict=True):
            # One voxel of margin; edge voxels extend half their side beyond their centre.
            ends.append(torch.tensor([part.start - 1.0, min(part.stop, side) + 1.0], dtype=torch.float64))
        corners = torch.cartesian_prod(*ends).T
        corners = torch.linalg.solve(self.to_source, torch.cat([corners, torch.ones_like(corners[:1])]))[:3]
        lowest, highest = corners.amin(1).floor().tolist(), corners.amax(1).ceil().tolist()
        d, h, w = (
            range(max(0, int(low)), max(0, min(side, int(high) + 1)))
            for low, high, side in zip(lowest, highest, self.target, strict=True)
        )
        return d, h, w

    def _place(self, axes: Sequence[Tensor], cells: Box) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the positions of a box of voxels along each source axis, and the voxels with a cell in ``cells``."""
        d, h, w = (axis.double() for axis in axes)
        wanted = torch.ones((), dtype=torch.bool, device=d.device)
        positions = []
        for (by_d, by_h, by_w, shift), side, part in zip(self.to_source[:3].tolist(), self.source, cells, strict=True):
            at = by_d * d[:, None, None] + by_h * h[:, None] + by_w * w + shift
            wanted = wanted & _is_covered(at, side)
            at = at.clamp(0, side - 1)
            wanted = wanted & (at >= part.start) & (at < part.stop)
            positions.append(at)
        return positions, wanted.nonzero(as_tuple=True)

    def _interpolate(self, held: Held, positions: Sequence[Tensor]) -> Tensor:
        below = [at.floor().long() for at in positions]
        above = [(low + 1).clamp_max(side - 1) for low, side in zip(below, self.source, strict=True)]
        index = [[held.locate(axis, of[axis]) for axis in range(3)] for of in (below, above)]
        weights = [(at - low).float() for at, low in zip(positions, below, strict=True)]

        def along(axis: int, chosen: tuple[int, ...]) -> Tensor:
            """Interpolate along ``axis``, after all axes before it, at the chosen corner of the axes after it."""
            if axis < 0:
                return held.values[:, index[chosen[0]][0], index[chosen[1]][1], index[chosen[2]][2]].float()
            lower, upper = (along(axis - 1, (end, *chosen)) for end in (0, 1))
            return lower.mul_(1 - weights[axis]).add_(upper.mul_(weights[axis]))

        return along(2, ())


Sampling = Aligned | Oblique
"""Rule to read the values of a source grid at the voxels of a target grid."""


def sample_grid(target: Grid, source: Grid, *, nearest_axis: int | None = None) -> Sampling:
    """Return the trilinear rule to read values on ``source`` at the voxels of ``target``.

    Edge voxels extend half their side beyond their centre. Along ``nearest_axis`` of the source, the nearest plane is
    used, the later of two equally near, as in nnU-Net; this requires parallel axes.
    """
    to_source = target.index_map(source)
    linear = to_source[:3, :3]
    axes = linear.abs().argmax(0).tolist()  # of the source, for each axis of the target
    aligned = torch.zeros_like(to_source)
    for axis, along in enumerate(axes):
        aligned[along, axis] = linear[along, axis]
    aligned[:, 3] = to_source[:, 3]
    if sorted(axes) != [0, 1, 2] or ((to_source - aligned) @ target.corners())[:3].abs().max() > WHOLE_VOXEL:
        if nearest_axis is not None:
            raise GridError("the axis with nearest planes must be parallel to an axis of the image, but is oblique")
        return Oblique(to_source, target.shape, source.shape)
    d, h, w = (
        _tabulate(
            along,
            float(linear[along, axis]),
            float(to_source[along, 3]),
            target.shape[axis],
            source,
            along == nearest_axis,
        )
        for axis, along in enumerate(axes)
    )
    return Aligned((d, h, w))


def _tabulate(source: int, scale: float, shift: float, target_side: int, grid: Grid, nearest: bool) -> AxisTable:
    side = grid.shape[source]
    at = torch.arange(target_side, dtype=torch.float64) * scale + shift
    step = 1.0 if scale > 0 else -1.0
    whole = torch.arange(target_side, dtype=torch.float64) * step + round(shift)
    is_whole = bool((at - whole).abs().max() <= WHOLE_VOXEL)
    at = whole if is_whole else at
    covered = _is_covered(at, side).nonzero()
    inside = range(int(covered[0]), int(covered[-1]) + 1) if len(covered) else range(0)
    if nearest:  # the later of two equally near planes, despite rounding in the affines
        at = (at + 0.5 + TIE).floor()
    at = at.clamp(0, side - 1)
    below = at.floor().long()
    weight = None if is_whole or nearest else (at - below).float()
    above = below if weight is None else (below + 1).clamp_max(side - 1)
    return AxisTable(source, inside, below, above, weight)


def _is_covered(at: Tensor, side: int) -> Tensor:
    # A voxel extends half its side beyond its centre; the tolerance allows rounding in the affines.
    return (at >= -0.5 - WHOLE_VOXEL) & (at <= side - 0.5 + WHOLE_VOXEL)


def _select(values: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return the planes ``indices`` of a dim; a view if they are adjacent."""
    first = int(indices[0])
    if indices.equal(torch.arange(first, first + len(indices))):
        return values.narrow(dim, first, len(indices))
    return values.index_select(dim, indices.to(values.device))


def split_box(box: Box, most_voxels: int) -> Iterator[Box]:
    """Yield boxes of at most ``most_voxels`` (at least one) that cover ``box``, cut along the first axes.

    Examples
    --------
    >>> [tuple(map(len, part)) for part in split_box((range(3), range(4), range(5)), 40)]
    [(2, 4, 5), (1, 4, 5)]
    """
    sides = [len(part) for part in box]
    if not all(sides):
        return
    step, room = [1, 1, 1], max(1, most_voxels)
    for axis in (2, 1, 0):  # whole rows are read fastest
        step[axis] = min(sides[axis], room)
        room = max(1, room // step[axis])
    for d, h, w in product(*(range(0, side, size) for side, size in zip(sides, step, strict=True))):
        yield box[0][d : d + step[0]], box[1][h : h + step[1]], box[2][w : w + step[2]]
