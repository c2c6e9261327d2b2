"""How large a patch and a batch a GPU takes: nnU-Net's rules, pure.

Axes come in any order, the same in all arguments; of axes that are equally long, the last one is shortened first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from volseg.errors import ConfigError
from volseg.models.topology import Topology, plan_topology
from volseg.planning.features import REFERENCE_BATCH

__all__ = ["PatchPlan", "plan_batch", "plan_patch", "smallest_patch"]

LARGEST_PATCH = 256**3
"""Voxels from which nnU-Net begins to shorten."""

SMALLEST_SIDES = (16, 24)
"""Of the axes that are halved, where there are several of them and where there is one."""

Sides = tuple[int, int, int]
Count = Callable[[Sequence[int], Topology], int]
Shape = Callable[[Sequence[float], Sequence[float]], Topology]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchPlan:
    """A patch, the network for it, and what that takes."""

    size: Sides
    topology: Topology
    features: int
    """Elements of one patch; see `volseg.planning.features`."""


def plan_patch(
    spacing: Sequence[float],
    median_shape: Sequence[float],
    count: Count,
    reference: float,
    *,
    shape: Shape = plan_topology,
) -> PatchPlan:
    """Return the largest patch whose network fits, in the proportions of the median case.

    The first patch is a cube (in mm) of 256 ** 3 voxels at this spacing, no longer than the median case. Its longest
    axis relative to the median case is shortened until the count is within ``reference``; if that axis can be no
    shorter, the next longest is. Every side is a multiple of the product of the network's strides along it.

    Parameters
    ----------
    spacing, median_shape : sequence of float
        At the target spacing.
    count : callable
        Of a patch and its topology; see `volseg.planning.features`.
    reference : float
        The count that fits.
    shape : callable
        Gives the network's topology for a patch and its spacing; raises `ConfigError` if there is none.

    Raises
    ------
    ConfigError
        If not even the smallest patch that has a network fits.
    """
    largest = _largest_sides(spacing)
    sides = [min(side, median) for side, median in zip(largest, median_shape, strict=True)]
    patch, topology = _fit(_least_sides(sides, spacing, shape), spacing, shape)
    while (features := count(patch, topology)) > reference:
        order = sorted(range(3), key=lambda axis: (patch[axis] / median_shape[axis], axis), reverse=True)
        found = next(filter(None, (_shorten(patch, axis, topology, spacing, shape) for axis in order)), None)
        if found is None:
            raise ConfigError(
                f"no patch fits: {patch} takes {features / 1e6:.0f} million features and {reference / 1e6:.0f} fit the "
                "memory; name a GPU with more of it"
            )
        patch, topology = found
    return PatchPlan(size=patch, topology=topology, features=features)


def _shorten(
    patch: Sides, axis: int, topology: Topology, spacing: Sequence[float], shape: Shape
) -> tuple[Sides, Topology] | None:
    """Return the next smaller patch along an axis, and its network; None if there is none."""
    sides = [*patch]
    sides[axis] -= topology.divisors[axis]
    try:
        # The step after this one may be finer: 256 is a multiple of 64, and what follows is 224, not 192.
        sides[axis] = patch[axis] - shape(sides, spacing).divisors[axis]
        return _fit(sides, spacing, shape) if sides[axis] > 0 else None
    except ConfigError:
        return None


def smallest_patch(sides: Sequence[float], spacing: Sequence[float]) -> tuple[Sides, Topology]:
    """Return the smallest sides that hold ``sides`` and that their U-Net takes, and that network."""
    return _fit(_least_sides(sides, spacing, plan_topology), spacing, plan_topology)


def plan_batch(features: int, reference: float, patch_voxels: int, dataset_voxels: float, *, share: float) -> int:
    """Return how many patches a batch has: what fits, at most a share of the data set's voxels, and two at least.

    >>> plan_batch(280_000_000, 560e6, 128**3, 1e9, share=0.05)
    4
    """
    fitting = round(reference / features * REFERENCE_BATCH)
    covering = round(dataset_voxels * share / patch_voxels)
    return max(min(fitting, covering), REFERENCE_BATCH)


def _largest_sides(spacing: Sequence[float]) -> list[int]:
    """Return the sides of a cube (mm) of `LARGEST_PATCH` voxels."""
    finest = [1 / mm for mm in spacing]
    scale = (LARGEST_PATCH / math.prod(finest)) ** (1 / 3)
    return [round(side * scale) for side in finest]


def _least_sides(sides: Sequence[float], spacing: Sequence[float], shape: Shape) -> list[float]:
    """Return the sides from which on there is a U: what is smaller lies in the middle of a patch, with 0 around it."""
    held = list(sides)
    for least in SMALLEST_SIDES:
        try:
            shape(held, spacing)
        except ConfigError:
            fine = [mm / min(spacing) < 2 for mm in spacing]
            held = [max(side, least) if halved else side for side, halved in zip(sides, fine, strict=True)]
    return held


def _fit(sides: Sequence[float], spacing: Sequence[float], shape: Shape) -> tuple[Sides, Topology]:
    topology = shape(sides, spacing)
    d, h, w = (math.ceil(side / step) * step for side, step in zip(sides, topology.divisors, strict=True))
    return (d, h, w), topology
