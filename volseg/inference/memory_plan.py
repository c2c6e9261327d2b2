"""Plan how many planes of a blend are held at a time, so that the blend fits into the free memory.

One layer of windows is held along the streamed axis, which costs no time. If a layer is too large, the volume is also
cut into strips along the other two axes. Each strip is streamed by itself; windows on a border are then computed twice.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from volseg.errors import OutOfMemoryError
from volseg.inference.sampling import Box
from volseg.inference.windows import MONAI, Layer, Windowing, choose_axis, list_layers, merge_layers, restrict_layers

__all__ = ["HELD_WHOLE_BYTES", "BlendPlan", "Region", "plan_blend"]


HELD_WHOLE_BYTES = 2**30
"""Blends up to this size are held whole, and volumes of equal size share a batch: fastest for small volumes."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Region:
    """A strip of the volume that is blended by itself."""

    cells: Box
    """Voxels at or after which labels are decided; all voxels along the streamed axis."""
    held: Box
    """Voxels that are blended: the cells, and the next plane for interpolation."""


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Planes of a blend that are held at a time, on the network's grid, padded to a window at least."""

    shape: tuple[int, int, int]
    window: tuple[int, int, int]
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """First voxels of the windows along each axis."""
    axis: int
    """The streamed axis."""
    whole: bool
    """Whether all layers are held until the end."""
    strips: tuple[int, int, int]
    """Number of strips along each axis; 1 along the streamed axis."""
    windowing: Windowing = MONAI
    share: tuple[int, int] = (0, 1)
    """Part of the volume along the streamed axis to decide, and number of parts; several parts are never ``whole``."""

    @property
    def depth(self) -> int:
        """Held planes of the streamed axis: those of a window, and the last plane before it for interpolation."""
        side = self.shape[self.axis]
        return side if self.whole else min(side, self.window[self.axis] + 1)

    @property
    def layers(self) -> list[Layer]:
        """Layers of windows along the streamed axis."""
        starts, side, window = self.starts[self.axis], self.shape[self.axis], self.window[self.axis]
        number, count = self.share
        if self.whole:
            return merge_layers(starts, side)
        layers = list_layers(starts, window, side)
        return layers if count == 1 else restrict_layers(layers, window, _cut(side, count)[number])

    def regions(self) -> Iterator[Region]:
        """Yield the strips; their cells cover the volume once."""
        for parts in product(*(_cut(side, count) for side, count in zip(self.shape, self.strips, strict=True))):
            d, h, w = (
                range(part.start, min(part.stop + 1, side)) for part, side in zip(parts, self.shape, strict=True)
            )
            yield Region((parts[0], parts[1], parts[2]), (d, h, w))

    def corners(self, held: Box, layer: Layer) -> list[tuple[int, int, int]]:
        """Return the first voxels of a layer's windows that reach into a region, in the order of summation."""
        d, h, w = (
            layer.starts if axis == self.axis else _reaching(self.starts[axis], self.window[axis], held[axis])
            for axis in range(3)
        )
        # By layers, then in this order: the order of the sums must not depend on the held planes.
        return sorted(product(d, h, w), key=lambda corner: corner[self.axis])

    def held_voxels(self) -> int:
        """Return the voxels held at a time for the largest region."""
        return math.prod(
            self.depth if axis == self.axis else _widest(self.shape[axis], self.strips[axis]) for axis in range(3)
        )

    def held_bytes(self, num_classes: int) -> int:
        """Return the bytes of a blend: all classes, and the sum of the weights, in float32."""
        return self.held_voxels() * (num_classes + 1) * FLOAT_BYTES

    def count_windows(self) -> int:
        """Return the number of windows through the model; windows on borders of strips count repeatedly."""
        return math.prod(
            _count_windows(self.starts[axis], self.window[axis], self.shape[axis], self.strips[axis])
            for axis in range(3)
        )


def plan_blend(
    shape: Sequence[int],
    window: Sequence[int],
    overlap: float,
    num_classes: int,
    budget: int,
    *,
    most_whole: int = HELD_WHOLE_BYTES,
    windowing: Windowing = MONAI,
    share: tuple[int, int] = (0, 1),
) -> BlendPlan:
    """Return the plan to blend a volume within a budget of bytes with the fewest windows.

    Parameters
    ----------
    shape, window : sequence of int
        Sides of the volume, and of the windows, which are not larger (voxels).
    overlap : float
        Fraction of a window that its neighbour shares.
    num_classes : int
        K.
    budget : int
        Bytes that the blend may take.
    most_whole : int
        Bytes up to which the volume is held whole.
    windowing : Windowing
        Positions of the windows, and weights of their voxels.
    share : (int, int)
        Number of the part to decide, and number of parts.

    Raises
    ------
    OutOfMemoryError
        If even strips of one voxel do not fit.
    """
    d, h, w = (tuple(windowing.starts(*sides, overlap)) for sides in zip(shape, window, strict=True))
    sides, axis = (shape[0], shape[1], shape[2]), choose_axis(shape, window)

    def plan(whole: bool, strips: tuple[int, int, int]) -> BlendPlan:
        return BlendPlan(sides, (window[0], window[1], window[2]), (d, h, w), axis, whole, strips, windowing, share)

    for whole in (True, False) if share[1] == 1 else (False,):
        candidate = plan(whole, (1, 1, 1))
        if candidate.held_bytes(num_classes) <= (min(budget, most_whole) if whole else budget):
            return candidate
    first, second = (other for other in range(3) if other != axis)
    fitting = []
    for count in _useful_counts(shape[first]):
        for other in _useful_counts(shape[second]):
            strips = [1, 1, 1]
            strips[first], strips[second] = count, other
            candidate = plan(False, (strips[0], strips[1], strips[2]))
            if candidate.held_bytes(num_classes) <= budget:
                fitting.append(candidate)
                break  # more strips take more windows
    if not fitting:
        least = candidate.held_bytes(num_classes)
        raise OutOfMemoryError(
            f"a volume of {' x '.join(map(str, shape))} voxels in windows of {' x '.join(map(str, window))} cannot be "
            f"blended: strips of one voxel take {least:,} bytes for {num_classes} classes, and {max(0, budget):,} are "
            "free; end what else uses the device, or take a smaller window"
        )
    return min(fitting, key=BlendPlan.count_windows)


def _cut(side: int, count: int) -> list[range]:
    """Cut a side into parts of nearly equal length."""
    edges = [side * part // count for part in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _widest(side: int, count: int) -> int:
    """Return the voxels of the widest of ``count`` strips, with the plane after it."""
    return min(side, -(-side // count) + (count > 1))


def _useful_counts(side: int) -> list[int]:
    """Return the useful numbers of strips: each is the smallest number for its width."""
    return sorted({-(-side // width) for width in range(1, side + 1)})


def _reaching(starts: Sequence[int], window: int, held: range) -> list[int]:
    return [start for start in starts if start < held.stop and start + window > held.start]


def _count_windows(starts: Sequence[int], window: int, side: int, strips: int) -> int:
    held = [range(part.start, min(part.stop + 1, side)) for part in _cut(side, strips)]
    return sum(len(_reaching(starts, window, part)) for part in held)
