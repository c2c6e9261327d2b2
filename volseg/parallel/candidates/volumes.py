"""The largest volume that fits: pure but for what follows a size, which is given.

What a step needs grows with the volume, nearly in proportion to its voxels. So the next size to look at is where the
line through the two nearest known ones meets the memory that there is, which takes three or four sizes where bisection
takes ten; a size between the largest known to fit and the smallest known not to is looked at until they are neighbours.
Sizes of another aspect say where to begin. Where it is known what of it tensors hold, the lines go through that: near
the capacity what is reserved does not grow any more, for torch gives back what it can. A size whose tensors alone would
take more than there is, by that line, is not looked at.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Largest", "find_largest", "scale_sides"]

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Of the longest side, in multiples of what it must be divisible by."""

MOSTLY_HELD = 0.85
"""Part of the memory that the tensors of the largest size hold, about: the rest is in pieces that nothing fits into.
Only what is looked at first depends on it."""

HELD = 1.05
"""Of the memory, from which on tensors do not fit, by a line through what two known sizes hold. In that line a V-Net's
are within 2 %."""

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
    fixed: int = 0,
    known: dict[int, int] | None = None,
    held: dict[int, int] | None = None,
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
    fixed : int
        Bytes that are taken whatever the size is, as far as they are known: with one size they give a line.
    known : dict, optional
        What sizes of other aspects take, by their voxels: where to begin, in place of ``first``. Sizes that are looked
        at are added.
    held : dict, optional
        What of it is held by tensors, or taken whatever the size is, by the voxels of sizes of all aspects; ``need``
        adds to it. It grows evenly with the size, where all that is taken comes to an end at the capacity: near that
        torch gives back what it has in reserve.
    """
    seen: dict[int, int | None] = {}
    known = {} if known is None else known
    held = {} if held is None else held
    others = dict(known)

    def look(step: int) -> int | None:
        if step not in seen:
            sides = scale_sides(step, aspect, divisors)
            seen[step] = found = need(sides)
            if found is not None:
                known[math.prod(sides)] = found
        return seen[step]

    low, high, step = 0, MOST_STEPS + 1, max(1, first)
    if held:
        step = _read_line(held, int(MOSTLY_HELD * capacity), aspect, divisors, fixed) or step
    elif others:
        step = _read_line(others, capacity, aspect, divisors, fixed) or step
    step = min(max(1, step), MOST_STEPS)
    for _ in range(TRIES):
        voxels = math.prod(scale_sides(step, aspect, divisors))
        if step == low + 1 and _hold_too_much(held, voxels, capacity):
            high = step
            break
        needed = look(step)
        if needed is not None and needed > capacity:
            high = step
        else:
            low = step
        if high - low <= 1:
            break
        step = _guess_next(seen, others, low, high, capacity, aspect, divisors, fixed, held)
    fitting = [number for number, needed in seen.items() if needed is not None and needed <= capacity]
    if not fitting:
        return None
    best = max(fitting)
    needed = seen[best]
    assert needed is not None
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return Largest(sides=scale_sides(best, aspect, divisors), needed=needed, limit=limit)


def _guess_next(
    seen: dict[int, int | None],
    others: dict[int, int],
    low: int,
    high: int,
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    fixed: int,
    held: dict[int, int],
) -> int:
    """Return a step strictly between ``low`` and ``high``: by a line, or by doubling or halving."""
    middle = (low + high) // 2 if high <= MOST_STEPS else max(1, low) * 2
    if held and len(seen) % 4 != 3:
        guess = _read_line(held, int(MOSTLY_HELD * capacity), aspect, divisors, fixed)
        return min(max(guess or middle, low + 1), high - 1)
    own = {
        math.prod(scale_sides(step, aspect, divisors)): needed for step, needed in seen.items() if needed is not None
    }
    # Of other aspects only while there are no two of this one: halos differ.
    points = own if len(own) > 1 else {**others, **own}
    guess = _read_line(points, capacity, aspect, divisors, fixed)
    if guess is not None and fixed and high > MOST_STEPS:
        # Two sizes that are near each other say little of a far one: no further than by the nearest and what is fixed.
        nearest = min(points, key=lambda voxels: abs(points[voxels] - capacity))
        guess = min(guess, _read_line({nearest: points[nearest]}, capacity, aspect, divisors, fixed) or guess)
    if guess is None or (len(seen) % 4 == 3 and high - low > 2 and high <= MOST_STEPS):
        guess = middle  # now and then: a line may miss again and again
    return min(max(guess, low + 1), high - 1)


def _hold_too_much(held: dict[int, int], voxels: int, capacity: int) -> bool:
    """Say whether tensors of a size do not fit in themselves, by the two largest sizes below it that are known."""
    (other, less), (size, most) = [(0, 0), (0, 0), *sorted(point for point in held.items() if point[0] < voxels)][-2:]
    if not other or most <= less:
        return False
    return most + (most - less) / (size - other) * (voxels - size) > HELD * capacity


def _read_line(
    points: dict[int, int], capacity: int, aspect: Sequence[int], divisors: Sequence[int], fixed: int
) -> int | None:
    """Return the largest step that fits by the line through the two nearest known sizes, or one and nothing at all."""
    nearest = sorted((abs(needed - capacity), voxels, needed) for voxels, needed in points.items())[:2]
    if not nearest:
        return None
    (_, voxels, needed), (_, other, less) = (*nearest, (0, 0, min(fixed, nearest[0][2] - 1)))[:2]
    slope = (needed - less) / (voxels - other) if voxels != other else 0.0
    if slope <= 0:
        return None
    target = max(voxels + (capacity - needed) / slope, 0.0)
    per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
    step = int((target / per_cube) ** (1 / 3))
    # Sides are rounded to multiples, so voxels do not quite grow with the cube.
    while step > 1 and math.prod(scale_sides(step, aspect, divisors)) > target:
        step -= 1
    while math.prod(scale_sides(step + 1, aspect, divisors)) <= target:
        step += 1
    return step
