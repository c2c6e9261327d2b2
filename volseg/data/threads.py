"""Work on many cases at once: decompression and resampling run outside Python's lock."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

__all__ = ["compute_in_one_thread", "map_in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` for every item, in order, computed by threads.

    By default there is a thread per core, at most 8, since each holds a case in memory. Closing the generator early
    cancels what has not begun. Each thread computes by itself; see `compute_in_one_thread`.
    """
    own = partial(torch.set_num_threads, 1)
    with (
        compute_in_one_thread(),
        ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1), initializer=own) as threads,
    ):
        yield from threads.map(function, items)


@contextmanager
def compute_in_one_thread() -> Iterator[None]:
    """Let torch sum in one order, whatever the number of cores: of several threads each sums a part.

    A case is then prepared to the same bits in a process that has one core and in one that has sixteen.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
