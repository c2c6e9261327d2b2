"""Find the largest volume that fits, by estimating the memory of as few sizes as possible.

A step's bytes grow nearly in proportion to the voxels of a volume. A line goes through the two known sizes, of any
aspect, that are nearest to a full GPU. The next size to try is where this line reaches the GPU's memory. The search
ends when the largest size known to fit and the smallest size known not to fit are neighbours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

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
    known: dict[int, float] | None = None,
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
        Voxels of the first size to try if no size is known.
    known : dict, optional
        Needs of known sizes by their voxels, also of other aspects; the search adds the sizes that it tries.
    """
    known = {} if known is None else known
    known.setdefault(0, 0)
    low, high, best = 0, MOST_STEPS + 1, None
    step = _extrapolate(known, capacity, aspect, divisors) or _find_step(voxels, aspect, divisors)
    stride = max(1, step // 8)
    for tries in count(1):
        step = min(max(step, low + 1), high - 1)
        sides = scale_sides(step, aspect, divisors)
        total = need(sides)
        if total is None or total <= capacity:
            low, best = step, best if total is None else (sides, int(total))
        else:
            high = step
        if total is not None and total < math.inf and total != capacity:  # cached blocks fill the rest of a full GPU
            known[math.prod(sides)] = total
        if high - low <= 1:
            break
        half = (low + high) // 2
        if high > MOST_STEPS:  # without a line and a limit: in growing strides
            half, stride = low + stride, 2 * stride
        # Bisect now and then: a line may miss repeatedly.
        is_due = tries % 4 == 0 and high <= MOST_STEPS
        step = half if is_due else _extrapolate(known, capacity, aspect, divisors) or half
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return None if best is None else Largest(sides=best[0], needed=best[1], limit=limit)


def _extrapolate(
    known: Mapping[int, float], capacity: int, aspect: Sequence[int], divisors: Sequence[int]
) -> int | None:
    """Return the step at which the line through two known sizes reaches the capacity; None without such a line."""
    nearest = sorted(known, key=lambda voxels: abs(known[voxels] - capacity))[:2]
    if len(nearest) < 2 or (rise := known[max(nearest)] - known[min(nearest)]) <= 0:
        return None
    more = (capacity - known[nearest[0]]) / rise * (max(nearest) - min(nearest))
    return _find_step(nearest[0] + more, aspect, divisors)


def _find_step(voxels: float, aspect: Sequence[int], divisors: Sequence[int]) -> int:
    """Return about the largest step with at most this many voxels, between 1 and ``MOST_STEPS``."""
    per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
    return min(max(1, int((max(0, voxels) / per_cube) ** (1 / 3) + 0.01)), MOST_STEPS)
