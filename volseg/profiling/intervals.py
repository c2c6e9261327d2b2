"""Lengths of unions and differences of intervals of time, each a pair of begin and end."""

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "count_overlap", "measure", "unite"]

Interval = tuple[float, float]


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as intervals that do not touch, in order.

    >>> unite([(3, 4), (0, 2), (1, 2.5), (4, 5)])
    [(0, 2.5), (3, 5)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def measure(intervals: Iterable[Interval]) -> float:
    """Return how long at least one of them lasts.

    >>> measure([(0, 2), (1, 3), (5, 6)])
    4
    """
    return sum(end - begin for begin, end in unite(intervals))


def count_overlap(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return how long at least one of either lasts at the same time.

    >>> count_overlap([(0, 2), (1, 3)], [(2, 5)])
    1
    """
    first: Sequence[Interval] = list(some)
    second: Sequence[Interval] = list(others)
    return measure(first) + measure(second) - measure([*first, *second])
