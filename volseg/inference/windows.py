"""Compute the positions of windows, the weights of their voxels, and the order of blending: pure.

Positions and weights are MONAI's (`sliding_window_inference`, mode ``gaussian``). The order is by layers: all windows
that start at one plane of the *streamed* axis, then those of the next plane. Planes before the next layer are finished,
so a blend needs to hold only one layer. The axis follows only from the shape. So every voxel's sum has one order, and
the same bits, for any held part of the volume.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from monai.data.utils import compute_importance_map
from torch import Tensor

__all__ = [
    "MONAI",
    "Layer",
    "Windowing",
    "choose_axis",
    "compute_importance",
    "compute_starts",
    "list_layers",
    "merge_layers",
    "restrict_layers",
]


def compute_starts(side: int, window: int, overlap: float) -> list[int]:
    """Return the first voxel of each window along one axis; the last window ends at the border.

    Examples
    --------
    >>> compute_starts(20, 8, 0.5), compute_starts(21, 8, 0.5), compute_starts(8, 8, 0.5)
    ([0, 4, 8, 12], [0, 4, 8, 12, 13], [0])
    """
    if not 0 < window <= side:
        raise ValueError(f"need 0 < window <= side, got {window=}, {side=}")
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
    """As `compute_starts`: rising, from 0 to the border."""
    importance: Callable[[Sequence[int], torch.device], Tensor]
    """As `compute_importance`: positive."""


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
    """Planes that no later window touches, and that earlier layers did not finish."""
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
    """Return the layers, of one window each, that some cells need, restricted to the planes of these cells.

    A cell needs its plane and the next plane, thus each window that touches either. Sums equal those of all layers.

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


def merge_layers(starts: Sequence[int], side: int) -> list[Layer]:
    """Return one layer of all windows, for a volume that is held whole."""
    return [Layer(tuple(starts), *[range(side)] * 3)]
