"""Follow several candidates at a time, each in a process that is a copy of this one.

To follow a step is Python alone, a second or some of it per candidate. Copies have the network and all that was
imported; what they find is some numbers. They are made for the command line only: in a training, threads and CUDA would
be copied along.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import torch

from volseg.errors import ParallelError
from volseg.forecast.candidate import Candidate, Forecast

__all__ = ["following_beside"]

Follow = Callable[[Candidate], Forecast]

_follow: Follow | None = None
"""What the copies call; a closure over the network, which they get by being copies and not by pickling."""


@contextmanager
def following_beside(follow: Follow, candidates: Sequence[Candidate]) -> Iterator[Follow]:
    """Begin to follow the candidates, in their order, as many at a time as there are cores; hand out what is found.

    Parameters
    ----------
    follow : callable
        Returns the forecast of one.
    candidates : sequence of Candidate
        Which to begin with; those that nobody asks for until the end are given up.
    """
    cores = min(os.cpu_count() or 1, len(candidates))
    if cores < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield follow
        return
    global _follow
    _follow = follow
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _use_one_thread)
    try:
        with warnings.catch_warnings():
            # Python warns of threads, which copies lack; those are torch's, and a copy that uses one thread needs none.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            begun = {each: pool.submit(_run, each) for each in candidates}
        yield lambda candidate: _wait(candidate, begun[candidate]) if candidate in begun else follow(candidate)
    finally:
        _follow = None
        for copy in set(multiprocessing.active_children()) - others:
            copy.terminate()
        pool.shutdown(cancel_futures=True)


def _wait(candidate: Candidate, future: "Future[Forecast]") -> Forecast:
    try:
        return future.result()
    except BrokenProcessPool as fault:
        raise ParallelError(
            f"a process that followed this step ended without a word while {candidate} was waited for: it was killed, "
            "perhaps for want of main memory, or the network ends its process; plan for one GPU to see which"
        ) from fault


def _use_one_thread() -> None:
    # A copy has no threads but its own; torch's workers of data loaders do the same.
    torch.set_num_threads(1)


def _run(candidate: Candidate) -> Forecast:
    assert _follow is not None
    return _follow(candidate)
