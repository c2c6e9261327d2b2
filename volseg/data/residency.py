"""Which cases lie on the device that trains: as many as a budget of bytes holds."""

from collections.abc import Sequence

__all__ = ["choose_budget", "choose_resident"]

SHARE_OF_MEMORY = 0.3
"""Of a device's free memory, what cases take by themselves; the rest is for training."""


def choose_budget(free_bytes: int, limit_bytes: int | None = None) -> int:
    """Return how many bytes cases may take of a device that has ``free_bytes``; a limit counts in place of the share.

    >>> choose_budget(100), choose_budget(100, limit_bytes=80), choose_budget(100, limit_bytes=120)
    (30, 80, 100)
    """
    return int(SHARE_OF_MEMORY * free_bytes) if limit_bytes is None else min(limit_bytes, free_bytes)


def choose_resident(sizes_bytes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Choose as many cases as the budget holds: the smallest, of equal ones the first.

    All cases are drawn equally often, so the number of cases decides how many patches need not be fetched, and which
    ones they are does not.

    >>> choose_resident([40, 10, 30, 10], budget_bytes=50)
    [False, True, True, True]
    """
    chosen, left = [False] * len(sizes_bytes), budget_bytes
    for index in sorted(range(len(sizes_bytes)), key=lambda index: sizes_bytes[index]):
        if sizes_bytes[index] > left:
            break
        chosen[index], left = True, left - sizes_bytes[index]
    return chosen
