"""Process a large volume slab by slab in threads, for functions that compute each voxel independently."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

ALONE_VOXELS = 2**22
"""Voxels up to which a volume is processed in one thread: it takes little time, and other cases run in parallel."""

MOST_THREADS = 8


def run_over_slabs(function: Callable[[slice], object], shape: Sequence[int], planes: int) -> None:
    """Call ``function`` with slices of ``planes`` planes that cover D planes of ``shape`` (D, H, W).

    A large volume uses several threads, each with single-threaded torch; an error in any thread is raised.
    """
    depth, height, width = shape
    slabs = [slice(begin, min(begin + planes, depth)) for begin in range(0, depth, planes)]
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    if depth * height * width <= ALONE_VOXELS or threads == 1:
        for slab in slabs:
            function(slab)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "slabs", initializer=partial(torch.set_num_threads, 1)) as pool:
            for future in [pool.submit(function, slab) for slab in slabs]:
                future.result()
    finally:
        torch.set_num_threads(before)  # threads started later inherit it
