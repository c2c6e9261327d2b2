"""Work on several candidates at a time, each in a process that is a copy of this one.

To follow a step is Python alone, a second or some of it per candidate. Copies have the network and all that was
imported; what they find is some numbers. They are made for the command line only: in a training, threads and CUDA would
be copied along.
"""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch

from volseg.errors import ParallelError

__all__ = ["FollowingCopies"]

Shared = TypeVar("Shared")
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

_shared: Any = None
"""What the copies work on; a network is in it, which they get by being copies and not by pickling."""


class FollowingCopies(Generic[Shared]):
    """Processes that answer what a function of ``shared`` and some arguments returns.

    Parameters
    ----------
    shared
        What they work on.
    beside
        Whether there are any: else this process answers, when it is asked.
    """

    def __init__(self, shared: Shared, *, beside: bool) -> None:
        cores = os.cpu_count() or 1
        is_copied = beside and cores > 1 and "fork" in multiprocessing.get_all_start_methods()
        self._shared = shared
        self._begun: dict[Any, Future[Any]] = {}
        self._pool = _make_pool(cores) if is_copied else None
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> Self:
        global _shared
        _shared = self._shared
        return self

    def __exit__(self, *fault: object) -> None:
        global _shared
        _shared = None
        if self._pool is not None:
            for copy in set(multiprocessing.active_children()) - self._others:
                copy.kill()  # it holds nothing, and may be in the middle of a step
            self._pool.shutdown(cancel_futures=True)

    def begin(
        self, function: Callable[Concatenate[Shared, Asked], Answer], *args: Asked.args, **kwargs: Asked.kwargs
    ) -> None:
        """Let a copy begin with it as soon as one is free; what nobody asks for until the end is given up."""
        key = _find_key(function, args)
        if self._pool is None or key in self._begun:
            return
        with warnings.catch_warnings():
            # Python warns of threads, which copies lack; those are torch's, and a copy that uses one thread needs none.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            self._begun[key] = self._pool.submit(_run, function, args, kwargs)

    def ask(
        self, function: Callable[Concatenate[Shared, Asked], Answer], *args: Asked.args, **kwargs: Asked.kwargs
    ) -> Answer:
        """Return what it returns.

        Raises
        ------
        ParallelError
            If the copy was killed.
        """
        self.begin(function, *args, **kwargs)
        future = self._begun.get(_find_key(function, args))
        if future is None:
            return function(self._shared, *args, **kwargs)
        try:
            found: Answer = future.result()
        except BrokenProcessPool as fault:
            raise ParallelError(
                f"a process that followed this step ended without a word while {args[0]} was waited for: it was "
                "killed, perhaps for want of main memory, or the network ends its process; plan for one GPU to see "
                "which"
            ) from fault
        return found


def _find_key(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function, repr(args)


def _make_pool(cores: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _begin_copy)


def _begin_copy() -> None:
    # A copy has no threads but its own; torch's workers of data loaders do the same.
    torch.set_num_threads(1)
    # What this process does about signals is no matter of its copies, which it ends: one that took a signal for its
    # step's fault went on to wait for the next step, and this process for it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(_shared, *args, **kwargs)
