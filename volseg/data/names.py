"""Names in messages: duplicates, and the first few of many."""

from collections import Counter
from collections.abc import Iterable, Sequence

__all__ = ["find_doubled", "list_some"]


def find_doubled(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in the order of their first place.

    >>> find_doubled(["b", "a", "c", "a", "b"])
    ['b', 'a']
    """
    return [name for name, count in Counter(names).items() if count > 1]


def list_some(texts: Sequence[str], most: int = 5) -> str:
    """List the first ``most`` texts, and count the rest.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")
