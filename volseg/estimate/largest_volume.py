"""Find the largest volume that fits, by estimating the memory of as few sizes as possible.

The size is doubled until it does not fit, and then bisected until the largest size that fits and the smallest size
that does not are neighbours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Upper limit of the longest side, in multiples of its divisor."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that fits."""

    sides: Sides
    """D, H, W."""
    needed: int
    """Bytes of the fullest GPU at this size."""
    limit: Sides | None = None
    """The next larger size, which does not fit; None if no limit was found."""


def scale_sides(step: int, aspect: Sequence[int], divisors: Sequence[int]) -> Sides:
    """Return sides of about this aspect; the longest side is ``step`` times its divisor.

    Examples
    --------
    >>> scale_sides(3, (32, 48, 32), (16, 16, 16)), scale_sides(4, (1, 1, 1), (16, 16, 16))
    ((32, 48, 32), (64, 64, 64))
    """
    longest = max(range(3), key=lambda axis: (aspect[axis], divisors[axis]))
    scale = step * divisors[longest] / aspect[longest]
    d, h, w = (max(1, round(side * scale / divisor)) * divisor for side, divisor in zip(aspect, divisors, strict=True))
    return d, h, w


def find_largest(
    need: Callable[[Sides], float | None],
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    *,
    voxels: int = 1,
) -> Largest | None:
    """Return the largest size that fits, or None if the smallest size does not fit.

    Parameters
    ----------
    need : callable
        Returns the bytes of the fullest GPU at a size; infinity if it is known only that the size does not fit. None
        means that the size cannot run; the search then tries larger sizes.
    capacity : int
        Bytes of a GPU.
    aspect : sequence of int
        Sides whose ratios are kept, as far as the divisors allow.
    divisors : sequence of int
        Each side is a multiple of its divisor.
    voxels : int
        Voxels of the first size to try.
    """
    low, high, best = 0, MOST_STEPS + 1, None
    step = _find_step(voxels, aspect, divisors)
    while high - low > 1:
        sides = scale_sides(step, aspect, divisors)
        total = need(sides)
        if total is None or total <= capacity:
            low, best = step, best if total is None else (sides, int(total))
        else:
            high = step
        step = (low + high) // 2 if high <= MOST_STEPS else min(2 * low, MOST_STEPS)
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return None if best is None else Largest(sides=best[0], needed=best[1], limit=limit)


def _find_step(voxels: float, aspect: Sequence[int], divisors: Sequence[int]) -> int:
    """Return about the largest step with at most this many voxels, between 1 and ``MOST_STEPS``."""
    per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
    return min(max(1, int((max(0, voxels) / per_cube) ** (1 / 3) + 0.01)), MOST_STEPS)
