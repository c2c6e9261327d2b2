"""Find the largest volume that fits, by estimating the memory of as few sizes as possible.

The bytes of tensors grow nearly in proportion to the voxels of a volume. So the next size to try is where the line
through the two nearest known sizes, of any aspect, reaches the bytes of tensors on a full GPU. The search ends when the
largest size known to fit and the smallest size known not to fit are neighbours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Upper limit of the longest side, in multiples of its divisor."""

MOSTLY_HELD, MOST_HELD = 0.85, 0.97
"""Lowest and highest guess of the share of memory that the tensors of the largest size hold; the rest is fragmented.
Only the order of the search depends on them."""

TOO_MUCH = 1.01
"""A size surely does not fit if the line through two known sizes puts its tensors above this share of the memory."""

TRIES = 24


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of the fullest GPU that a size needs."""

    total: int
    """All bytes that the GPU must have."""
    held: int | None
    """The part of ``total`` that tensors hold or that every size takes. None if the trace stopped early, as the size
    does not fit: ``total`` is then a lower bound."""


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
    need: Callable[[Sides], Need | None],
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    *,
    first: int = 1,
    known: dict[int, Need] | None = None,
) -> Largest | None:
    """Return the largest size that fits, or None if the smallest size does not fit.

    Parameters
    ----------
    need : callable
        Returns the need of a size. None means that the size cannot run; the search then tries larger sizes.
    capacity : int
        Bytes of a GPU.
    aspect : sequence of int
        Sides whose ratios are kept, as far as the divisors allow.
    divisors : sequence of int
        Each side is a multiple of its divisor.
    first : int
        First step if no size is known: the longest side in multiples of its divisor.
    known : dict, optional
        Needs of known sizes by their voxels, also of other aspects; the search adds the sizes that it tries.
    """
    known = {} if known is None else known
    low, high = 0, MOST_STEPS + 1
    best: tuple[int, int] | None = None
    step = _guess(known, low, high, capacity, aspect, divisors) if known else max(1, min(first, MOST_STEPS))
    for tries in range(1, TRIES + 1):
        sides = scale_sides(step, aspect, divisors)
        if step == low + 1 and _hold_too_much(known, math.prod(sides), capacity):
            high = step
            break
        found = need(sides)
        if found is not None:
            known[math.prod(sides)] = found
        if found is not None and found.total > capacity:
            high = step
        else:
            low, best = step, best if found is None else (step, found.total)
        if high - low <= 1:
            break
        # Bisect now and then: a line may miss repeatedly.
        step = _guess({} if tries % 6 == 5 and high <= MOST_STEPS else known, low, high, capacity, aspect, divisors)
    if best is None:
        return None
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return Largest(sides=scale_sides(best[0], aspect, divisors), needed=best[1], limit=limit)


def _guess(
    known: dict[int, Need], low: int, high: int, capacity: int, aspect: Sequence[int], divisors: Sequence[int]
) -> int:
    """Return a step strictly between ``low`` and ``high``: by a line, by doubling or by bisection."""
    guess = (low + high) // 2 if high <= MOST_STEPS else max(1, low) * 2
    held = {voxels: each.held for voxels, each in known.items() if each.held is not None}
    near = [each.held / each.total for each in known.values() if each.held is not None and each.total >= capacity / 2]
    target = min(max([MOSTLY_HELD, *near[-1:]]), MOST_HELD) * capacity
    nearest = sorted(held, key=lambda voxels: abs(held[voxels] - target))[:2]
    if nearest:
        one, other = (*nearest, 0)[:2]
        slope = (held[one] - held.get(other, 0)) / (one - other)
        if slope > 0:
            line = _find_step(int(one + (target - held[one]) / slope), aspect, divisors)
            # A line that overshot a stopped size would overshoot again one size below.
            guess = guess if line >= high and len(held) < len(known) else line
    fits = max((voxels for voxels, each in known.items() if each.total <= capacity), default=0)
    fails = min((voxels for voxels, each in known.items() if each.total > capacity), default=None)
    if fails is not None:
        # The first size is a good guess: the largest is not far below, and no line tells how far.
        most = _find_step(fails - 1, aspect, divisors)
        is_first = len(known) == 1 and not held
        guess = _find_step(3 * fails // 4, aspect, divisors) if is_first else min(guess, most)
    return min(max(guess, _find_step(fits, aspect, divisors), low + 1), high - 1)


def _hold_too_much(known: dict[int, Need], voxels: int, capacity: int) -> bool:
    """Return whether the tensors of a size exceed the memory, extrapolated from the two largest known smaller sizes."""
    below = sorted((size, each.held) for size, each in known.items() if size < voxels and each.held is not None)
    if len(below) < 2:
        return False
    (other, less), (size, most) = below[-2:]
    return most > less and most + (most - less) / (size - other) * (voxels - size) > TOO_MUCH * capacity


def _find_step(voxels: int, aspect: Sequence[int], divisors: Sequence[int]) -> int:
    """Return the largest step with at most this many voxels; 0 if there is none."""
    per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
    step = int((max(0, voxels) / per_cube) ** (1 / 3))
    # Sides are rounded to multiples, so voxels do not quite grow with the cube.
    while step > 0 and math.prod(scale_sides(step, aspect, divisors)) > voxels:
        step -= 1
    while math.prod(scale_sides(step + 1, aspect, divisors)) <= voxels:
        step += 1
    return step
