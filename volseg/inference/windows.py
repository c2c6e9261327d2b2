"""Compute the positions of windows, the weights of their voxels, and the order of blending, by pure functions.

Positions and weights are MONAI's (`sliding_window_inference`, mode ``gaussian``). The order is by layers: all windows
that start at one plane of the *streamed* axis, then those of the next plane. Planes before the next layer are finished,
so a blend needs memory for only one layer. The axis depends only on the shape. So every voxel's sum has one order, and
the same bits, for any part of the volume in memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from monai.data.utils import compute_importance_map
from torch import Tensor

from volseg.errors import OutOfMemoryError
from volseg.inference.sampling import Box


def compute_starts(side: int, window: int, overlap: float) -> list[int]:
    """Return the first voxel of each window along one axis; the last window ends at the border.

    Examples
    --------
    >>> compute_starts(20, 8, 0.5), compute_starts(21, 8, 0.5), compute_starts(8, 8, 0.5)
    ([0, 4, 8, 12], [0, 4, 8, 12, 13], [0])
    """
    if not 0 < window <= side:
        raise ValueError(f"needed: 0 < window <= side, got {window=}, {side=}")
    last, step = side - window, max(1, int(window * (1 - overlap)))
    return [*range(0, last, step), last]


def compute_importance(window: Sequence[int], device: torch.device) -> Tensor:
    """Return the weight of each voxel of a window, ``(d, h, w)`` float32: a Gaussian of an eighth of each side."""
    importance: Tensor = compute_importance_map(tuple(window), mode="gaussian", sigma_scale=0.125, device=device)
    return importance


@dataclass(frozen=True, slots=True)
class Windowing:
    """Rule for the positions of windows and the weights of their voxels."""

    starts: Callable[[int, int, float], Sequence[int]]
    """Function like `compute_starts`; the positions increase from 0 to the border."""
    importance: Callable[[Sequence[int], torch.device], Tensor]
    """Function like `compute_importance`; the weights are positive."""


MONAI = Windowing(compute_starts, compute_importance)


def choose_axis(shape: Sequence[int], window: Sequence[int]) -> int:
    """Return the axis along which a layer is the smallest part of the volume; of equal axes, the first."""
    return min(range(3), key=lambda axis: min(1.0, (window[axis] + 1) / shape[axis]))


@dataclass(frozen=True, slots=True)
class Layer:
    """Windows that are blended before the next planes are decided; all ranges are planes of the streamed axis."""

    starts: tuple[int, ...]
    """First planes of the layer's windows."""
    fresh: range
    """Planes that no earlier window has touched."""
    finished: range
    """Planes that no later window touches and that earlier layers did not finish."""
    ready: range
    """Planes that can now be decided: interpolation between each and the next plane has all its inputs."""


def list_layers(starts: Sequence[int], window: int, side: int) -> list[Layer]:
    """Return the layers of one streamed axis, in their order; each of the four ranges covers the axis once.

    Examples
    --------
    >>> for layer in list_layers([0, 4, 6], 8, 14):
    ...     print(layer.fresh, layer.finished, layer.ready)
    range(0, 8) range(0, 4) range(0, 3)
    range(8, 12) range(4, 6) range(3, 5)
    range(12, 14) range(6, 14) range(5, 14)
    """
    stops = [0, *(start + window for start in starts)]
    finished = [0, *starts[1:], side]
    ready = [0, *(start - 1 for start in starts[1:]), side]
    return [
        Layer((start,), range(*fresh), range(*done), range(*decided))
        for start, fresh, done, decided in zip(
            starts, pairwise(stops), pairwise(finished), pairwise(ready), strict=True
        )
    ]


def restrict_layers(layers: Sequence[Layer], window: int, cells: range) -> list[Layer]:
    """Return the layers, of one window each, that ``cells`` need, restricted to the planes of these cells.

    A cell needs its plane and the next plane, and so each window that touches either. Sums equal those of all layers.

    Examples
    --------
    >>> for layer in restrict_layers(list_layers([0, 4, 6], 8, 14), 8, range(9, 14)):
    ...     print(layer.starts, layer.fresh, layer.finished, layer.ready)
    (4,) range(4, 12) range(9, 6) range(9, 5)
    (6,) range(12, 14) range(9, 14) range(9, 14)
    """
    needed = [layer for layer in layers if layer.starts[0] <= cells.stop and layer.starts[0] + window > cells.start]
    kept = []
    for number, layer in enumerate(needed):
        (start,) = layer.starts
        fresh = layer.fresh if number else range(start, start + window)  # no earlier window has touched these
        finished = range(max(layer.finished.start, cells.start), min(layer.finished.stop, cells.stop + 1))
        ready = range(max(layer.ready.start, cells.start), min(layer.ready.stop, cells.stop))
        kept.append(Layer(layer.starts, fresh, finished, ready))
    return kept


# Plan how many planes of a blend are in memory at a time, so that the blend fits into the free memory. One layer of
# windows is in memory along the streamed axis, which costs no time. If a layer is too large, the volume is also cut
# into strips along the other two axes. Each strip is streamed separately; windows on a border are then computed twice.


HELD_WHOLE_BYTES = 2**30
"""Blends up to this size are completely in memory, and volumes of equal size share a batch: fastest for small ones."""

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Planes of a blend that are in memory at a time, on the network's grid, padded to at least one window."""

    shape: tuple[int, int, int]
    window: tuple[int, int, int]
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """First voxels of the windows along each axis."""
    axis: int
    """The streamed axis."""
    whole: bool
    """Whether all layers are in memory until the end."""
    strips: tuple[int, int, int]
    """Number of strips along each axis; 1 along the streamed axis."""
    windowing: Windowing = MONAI
    share: tuple[int, int] = (0, 1)
    """Index of the part along the streamed axis to decide, and number of parts; several parts are never ``whole``."""

    @property
    def depth(self) -> int:
        """Planes of the streamed axis in memory: those of a window, and the last plane before it for interpolation."""
        side = self.shape[self.axis]
        return side if self.whole else min(side, self.window[self.axis] + 1)

    @property
    def layers(self) -> list[Layer]:
        """Layers of windows along the streamed axis."""
        starts, side, window = self.starts[self.axis], self.shape[self.axis], self.window[self.axis]
        number, count = self.share
        if self.whole:
            return [Layer(starts, *[range(side)] * 3)]
        layers = list_layers(starts, window, side)
        return layers if count == 1 else restrict_layers(layers, window, _cut(side, count)[number])

    def list_strips(self) -> Iterator[Box]:
        """Return the strips that are blended one by one; together they cover the volume once.

        A strip is a box of cells; labels are decided at positions from one voxel of a cell up to the next.
        """
        d, h, w = (_cut(side, count) for side, count in zip(self.shape, self.strips, strict=True))
        return product(d, h, w)

    def hold(self, cells: Box) -> Box:
        """Return the voxels that are blended for a strip: its cells, and the next plane for interpolation."""
        d, h, w = (range(part.start, min(part.stop + 1, side)) for part, side in zip(cells, self.shape, strict=True))
        return d, h, w

    def restrict(self, cells: Box, planes: range) -> Box:
        """Return the cells in some planes of the streamed axis."""
        d, h, w = (planes if axis == self.axis else part for axis, part in enumerate(cells))
        return d, h, w

    def corners(self, held: Box, layer: Layer) -> list[tuple[int, int, int]]:
        """Return the first voxels of a layer's windows that overlap a region, in the order of summation."""
        d, h, w = (
            layer.starts if axis == self.axis else _reaching(self.starts[axis], self.window[axis], held[axis])
            for axis in range(3)
        )
        # By layers, then in this order: the order of the sums must not depend on the planes in memory.
        return sorted(product(d, h, w), key=lambda corner: corner[self.axis])

    def held_bytes(self, num_classes: int) -> int:
        """Return the bytes of the largest region's blend: all classes, and the sum of the weights, in float32."""
        # The widest strip, with the plane after it.
        held = [min(side, -(-side // count) + (count > 1)) for side, count in zip(self.shape, self.strips, strict=True)]
        held[self.axis] = self.depth
        return math.prod(held) * (num_classes + 1) * FLOAT_BYTES


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
    """Return the plan to blend a volume within a budget of bytes, in the widest strips that fit.

    Parameters
    ----------
    shape, window : sequence of int
        Sides of the volume and of the windows (voxels); windows are not larger than the volume.
    overlap : float
        Fraction of a window that its neighbour shares.
    num_classes : int
        K.
    budget : int
        Bytes that the blend may use.
    most_whole : int
        Bytes up to which the whole blend is in memory.
    windowing : Windowing
        Positions of the windows, and weights of their voxels.
    share : (int, int)
        Index of the part to decide, and number of parts.

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
    others = [other for other in range(3) if other != axis]
    strips = [1, 1, 1]
    while candidate.held_bytes(num_classes) > budget:
        widest = max(others, key=lambda other: -(-sides[other] // strips[other]))
        if strips[widest] == sides[widest]:
            least = candidate.held_bytes(num_classes)
            raise OutOfMemoryError(
                f"a volume of {' x '.join(map(str, shape))} voxels in windows of {' x '.join(map(str, window))} cannot "
                f"be blended: strips of one voxel need {least:,} bytes for {num_classes} classes, but "
                f"{max(0, budget):,} are free; end other programs on the device, or choose a smaller window"
            )
        strips[widest] += 1
        candidate = plan(False, (strips[0], strips[1], strips[2]))
    return candidate


def _cut(side: int, count: int) -> list[range]:
    """Cut a side into parts of nearly equal length."""
    edges = [side * part // count for part in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _reaching(starts: Sequence[int], window: int, held: range) -> list[int]:
    return [start for start in starts if start < held.stop and start + window > held.start]
