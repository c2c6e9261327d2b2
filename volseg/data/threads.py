"""Work on many cases at once: decompression and resampling run outside Python's lock."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = min(8, os.cpu_count() or 1)
"""Default number of threads; each keeps a case in memory."""


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` for every item, in order, computed by threads.

    By default there is a thread per core, at most 8. Closing the generator early cancels waiting work. torch uses one
    thread in each of them; see `compute_in_one_thread`.
    """
    own = partial(torch.set_num_threads, 1)
    with compute_in_one_thread(), ThreadPoolExecutor(workers or MOST_THREADS, initializer=own) as threads:
        yield from threads.map(function, items)


@contextmanager
def compute_in_one_thread() -> Iterator[None]:
    """Make torch sum in the same order on any number of cores; of several threads, each would sum a part."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
