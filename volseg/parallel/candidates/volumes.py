"""The largest volume that fits: pure; whoever follows the sizes is told which, and tells what they take.

What tensors hold grows with the volume, nearly in proportion to its voxels. So the next size to look at is where the
line through the two nearest known ones, of any aspect, comes to what a full GPU's tensors hold, which takes three or
four sizes where bisection takes ten; a size between the largest known to fit and the smallest known not to is looked at
until they are neighbours. The lines do not go through all that is taken: near the capacity that does not grow any more,
for torch gives back what it can. A size whose tensors alone would take more than there is, by that line, is not looked
at.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Largest", "Need", "NextSize", "scale_sides", "search_largest"]

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Of the longest side, in multiples of what it must be divisible by."""

MOSTLY_HELD, MOST_HELD = 0.85, 0.97
"""Part of the memory that the tensors of the largest size hold, about: the rest is in pieces that nothing fits into.
A known size of about as much memory says it better, up to the second of them. Only what is looked at first depends on
it."""

HELD = 1.05
"""Of the memory, from which on tensors do not fit, by a line through what two known sizes hold. In that line a V-Net's
are within 2 %."""

TRIES = 24
"""Sizes to look at, at most; each halves what is left at least every second time."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a size takes of the fullest GPU, in bytes."""

    total: int
    """All that the GPU must have."""
    held: int | None
    """Of it, what tensors hold, or what is taken whatever the size is. It grows evenly with the size, where all that is
    taken comes to an end at the capacity: near that torch gives back what it has in reserve. None where it is not
    known: ``total`` is then the least that it can be."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """What fits."""

    sides: Sides
    """D, H, W."""
    needed: int
    """Bytes of the fullest GPU."""
    limit: Sides | None = None
    """The next larger size, which does not fit; None where no limit was found."""


@dataclass(frozen=True, kw_only=True)
class NextSize:
    """A size whose need is asked for."""

    sides: Sides
    next_ones: tuple[Sides, ...] = ()
    """What will probably be asked for behind it, the likeliest first: for who can look at several at a time."""


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


def search_largest(
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    *,
    first: int = 1,
    fixed: int = 0,
    known: dict[int, Need] | None = None,
) -> Generator[NextSize, Need | None, Largest | None]:
    """Ask for what sizes take, one by one, and return the largest that fits.

    Parameters
    ----------
    capacity : int
        Bytes that there are.
    aspect : sequence of int
        Sides whose ratios are kept, as far as the divisors let.
    divisors : sequence of int
        What each side must be a multiple of.
    first : int
        Where to begin where nothing is known: multiples of its divisor that the longest side has.
    fixed : int
        Bytes that are held whatever the size is, as far as they are known: with one size they give a line.
    known : dict, optional
        What sizes take, also of other aspects, by their voxels: where to look. Sizes that are looked at are added.

    Yields
    ------
    NextSize
        A size; what it takes is sent, or None where it cannot be run, as if it were too small.

    Returns
    -------
    Largest or None
        None where the smallest size does not fit.
    """
    seen: dict[int, Need | None] = {}
    known = {} if known is None else known
    low, high = 0, MOST_STEPS + 1
    step = _guess(known, low, high, capacity, aspect, divisors, fixed) if known else first
    step = min(max(1, step), MOST_STEPS)
    for tries in range(1, TRIES + 1):
        sides = scale_sides(step, aspect, divisors)
        if step == low + 1 and _hold_too_much(known, math.prod(sides), capacity):
            high = step
            break
        beside = [each for each in (step + 1, step - 1) if low < each < high]
        next_ones = tuple(scale_sides(each, aspect, divisors) for each in beside)
        seen[step] = needed = yield NextSize(sides=sides, next_ones=next_ones)
        if needed is not None:
            known[math.prod(sides)] = needed
        if needed is not None and needed.total > capacity:
            high = step
        else:
            low = step
        if high - low <= 1:
            break
        # Now and then by halves: a line may miss again and again.
        points = {} if tries % 4 == 3 and high <= MOST_STEPS else known
        step = _guess(points, low, high, capacity, aspect, divisors, fixed)
    fitting = {number: each for number, each in seen.items() if each is not None and each.total <= capacity}
    if not fitting:
        return None
    best = max(fitting)
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return Largest(sides=scale_sides(best, aspect, divisors), needed=fitting[best].total, limit=limit)


def _guess(
    known: Mapping[int, Need],
    low: int,
    high: int,
    capacity: int,
    aspect: Sequence[int],
    divisors: Sequence[int],
    fixed: int,
) -> int:
    """Return a step strictly between ``low`` and ``high``: by a line, by doubling or by halving.

    A size with fewer voxels than one that fits, or more than one that does not, is looked at where no other is left.
    """
    guess = (low + high) // 2 if high <= MOST_STEPS else max(1, low) * 2
    line = _read_line(known, _find_target(known, capacity), aspect, divisors, fixed)
    is_bound = any(needed.held is None for needed in known.values())
    # A line that misses what was given up misses it again one size below.
    guess = guess if line is None or (line >= high and is_bound) else line
    fits = max((voxels for voxels, needed in known.items() if needed.total <= capacity), default=None)
    fails = min((voxels for voxels, needed in known.items() if needed.total > capacity), default=None)
    if fails is not None:
        guess = min(guess, _find_step(fails - 1, aspect, divisors))
    if fits is not None:
        guess = max(guess, _find_step(fits, aspect, divisors))
    return min(max(guess, low + 1), high - 1)


def _find_target(known: Mapping[int, Need], capacity: int) -> int:
    """Return the bytes that the tensors of the largest size hold, about."""
    near = [each for each in known.values() if each.held is not None and capacity <= 2 * each.held <= 4 * capacity]
    parts = [each.held / each.total for each in near if each.held is not None and each.total]
    return int(min(max([MOSTLY_HELD, *parts[-1:]]), MOST_HELD) * capacity)


def _hold_too_much(known: Mapping[int, Need], voxels: int, capacity: int) -> bool:
    """Say whether tensors of a size do not fit in themselves, by the two largest sizes below it that are known."""
    below = sorted(each for each in _list_held(known) if each[0] < voxels)
    if len(below) < 2:
        return False
    (other, less), (size, most) = below[-2:]
    return most > less and most + (most - less) / (size - other) * (voxels - size) > HELD * capacity


def _list_held(known: Mapping[int, Need]) -> list[tuple[int, int]]:
    return [(voxels, needed.held) for voxels, needed in known.items() if needed.held is not None]


def _read_line(
    known: Mapping[int, Need], target: int, aspect: Sequence[int], divisors: Sequence[int], fixed: int
) -> int | None:
    """Return the largest step that holds no more than a target by the line through the two nearest known sizes.

    Where one is known, through that and what is fixed.
    """
    nearest = sorted((abs(held - target), voxels, held) for voxels, held in _list_held(known))[:2]
    if not nearest:
        return None
    (_, voxels, held), (_, other, less) = (*nearest, (0, 0, min(fixed, nearest[0][2] - 1)))[:2]
    slope = (held - less) / (voxels - other) if voxels != other else 0.0
    return None if slope <= 0 else _find_step(int(voxels + (target - held) / slope), aspect, divisors)


def _find_step(voxels: int, aspect: Sequence[int], divisors: Sequence[int]) -> int:
    """Return the largest step with no more voxels, 0 where there is none."""
    per_cube = math.prod(scale_sides(1000, aspect, divisors)) / 1000**3
    step = int((max(0, voxels) / per_cube) ** (1 / 3))
    # Sides are rounded to multiples, so voxels do not quite grow with the cube.
    while step > 0 and math.prod(scale_sides(step, aspect, divisors)) > voxels:
        step -= 1
    while math.prod(scale_sides(step + 1, aspect, divisors)) <= voxels:
        step += 1
    return step
