"""The largest volume that fits: pure but for what follows a size, which is given.

What a step needs grows with the volume, nearly in proportion to its voxels. So the next size to look at is where the
line through the two nearest known ones meets the memory that there is, which takes three or four sizes where bisection
takes ten; a size between the largest known to fit and the smallest known not to is looked at until they are neighbours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Largest", "find_largest", "scale_sides"]

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Of the longest side, in multiples of what it must be divisible by."""

TRIES = 24
"""Sizes to look at, at most; each halves what is left at least every second time."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """What fits."""

    sides: Sides
    """D, H, W."""
    needed: int
    """Bytes of the fullest GPU."""
    limit: Sides | None = None
    """The next larger size, which does not fit; None where no limit was found."""


def scale_sides(step: int, aspect: Sequence[int], divisors: Sequence[int]) -> Sides:
    """Return sides of about that aspect, the longest of which is ``step`` times its divisor.

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
    need: Callable[[Sides], int | None],
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    *,
    first: int = 1,
) -> Largest | None:
    """Return the largest size of an aspect that fits; None where the smallest does not.

    Parameters
    ----------
    need : callable
        Returns the bytes that a size takes; None for one that cannot be run, as if it were too small.
    capacity : int
        Bytes that there are.
    aspect : sequence of int
        Sides whose ratios are kept, as far as the divisors let.
    divisors : sequence of int
        What each side must be a multiple of.
    first : int
        Where to begin: multiples of its divisor that the longest side has.
    """
    seen: dict[int, int | None] = {}

    def look(step: int) -> int | None:
        if step not in seen:
            seen[step] = need(scale_sides(step, aspect, divisors))
        return seen[step]

    low, high, step = 0, MOST_STEPS + 1, max(1, first)
    for _ in range(TRIES):
        needed = look(step)
        if needed is not None and needed > capacity:
            high = step
        else:
            low = step
        if high - low <= 1:
            break
        step = _guess_next(seen, low, high, capacity, aspect, divisors)
    known = [number for number, needed in seen.items() if needed is not None and needed <= capacity]
    if not known:
        return None
    best = max(known)
    needed = seen[best]
    assert needed is not None
    limit = scale_sides(high, aspect, divisors) if high in seen else None
    return Largest(sides=scale_sides(best, aspect, divisors), needed=needed, limit=limit)


def _guess_next(
    seen: dict[int, int | None], low: int, high: int, capacity: int, aspect: Sequence[int], divisors: Sequence[int]
) -> int:
    """Return a step strictly between ``low`` and ``high``: by the line through two sizes, or by doubling or halving."""
    points = sorted(
        (abs(needed - capacity), math.prod(scale_sides(step, aspect, divisors)), needed)
        for step, needed in seen.items()
        if needed is not None
    )
    middle = (low + high) // 2 if high <= MOST_STEPS else max(1, low) * 2
    if len(points) == 1 and len(seen) == 1 and points[0][2] > capacity:
        # The line through nothing: what is needed besides voxels is little where this much does not fit.
        guess = int(high * (capacity / points[0][2]) ** (1 / 3))
    elif len(points) < 2 or len(seen) % 3 == 2:  # now and then the middle: a line may miss again and again
        guess = middle
    else:
        (_, voxels, needed), (_, others, need) = points[:2]
        slope = (needed - need) / (voxels - others) if voxels != others else 0.0
        target = voxels + (capacity - needed) / slope if slope > 0 else 0.0
        per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
        guess = int((max(target, 0.0) / per_cube) ** (1 / 3)) if target else middle
        if guess == low:  # it is as near as it can be: see whether the next one fits
            guess = low + 1
    return min(max(guess, low + 1), high - 1)
