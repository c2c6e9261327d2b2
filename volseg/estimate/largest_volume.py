"""Find the largest volume that fits, by estimating the memory of a few sizes.

The bytes of tensors grow nearly in proportion to the voxels of a volume. So the next size to try is where the tensors
of the last one, scaled by the voxels, would nearly fill a GPU. The search ends when the largest size known to fit and
the smallest size known not to fit are neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sides = tuple[int, int, int]

MOST_STEPS = 4096
"""Upper limit of the longest side, in multiples of its divisor."""

HELD = 0.93
"""Guess of the share of memory that the tensors of the largest size hold; the rest is fragmented. Only the order of the
search depends on it."""

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
    need: Callable[[Sides], Need | None], capacity: int, aspect: Sequence[int], divisors: Sequence[int], first: int = 1
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
        First step: the longest side in multiples of its divisor.
    """
    low, high, step = 0, MOST_STEPS + 1, max(1, min(first, MOST_STEPS))
    best: tuple[int, int] | None = None
    for tries in range(TRIES):
        found = need(scale_sides(step, aspect, divisors))
        if found is not None and found.total > capacity:
            high = step
        else:
            low, best = step, best if found is None else (step, found.total)
        if high - low <= 1:
            break
        guess = (low + high) // 2 if high <= MOST_STEPS else 2 * low
        if tries < TRIES // 3 and found is not None and found.held:  # bisect if the tensors mislead
            guess = int(step * (HELD * capacity / found.held) ** (1 / 3))
        step = min(max(guess, low + 1), high - 1)
    if best is None:
        return None
    limit = scale_sides(high, aspect, divisors) if high <= MOST_STEPS else None
    return Largest(sides=scale_sides(best[0], aspect, divisors), needed=best[1], limit=limit)
