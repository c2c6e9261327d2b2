"""Work on many cases at once: decompression and resampling run outside Python's lock."""

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["map_in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` for every item, in order, computed by threads.

    By default there is a thread per core, at most 8, since each holds a case in memory. Closing the generator early
    cancels what has not begun.
    """
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as threads:
        yield from threads.map(function, items)
