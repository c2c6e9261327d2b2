"""Work on several candidates at a time, each in a process that is a copy of this one.

To follow a step is Python alone, a second or some of it per candidate. Copies have the network and all that was
imported; what they find is some numbers. They are made for the command line only, and never of a process that has begun
to use CUDA, or that is one of several: CUDA does not survive a fork, its first call in a copy (autograd asks for the
GPUs by itself) is an error, and threads of collectives would be copied in the middle of what they do. Such a process
follows every step itself.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch

from volseg.device.gpus import uses_gpus
from volseg.device.torch_internals import is_in_bad_fork
from volseg.errors import ParallelError
from volseg.lifetime import bind_copy
from volseg.parallel.devices import has_process_group, is_launched
from volseg.signals import ENDING

__all__ = ["FollowingCopies", "ask_copy", "holding_signals_back"]

Shared = TypeVar("Shared")
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

_shared: Any = None
"""What the copies work on; a network is in it, which they get by being copies and not by pickling."""

_CANNOT = "this copy has a broken CUDA"
"""What a copy answers in place of a result, where this process had begun to use CUDA without torch's knowing."""


class FollowingCopies(Generic[Shared]):
    """Processes that answer what a function of ``shared`` and some arguments returns.

    Parameters
    ----------
    shared
        What they work on.
    beside
        Whether there are any, where they can be made: else this process answers, when it is asked.
    """

    def __init__(self, shared: Shared, *, beside: bool) -> None:
        cores = os.cpu_count() or 1
        is_copied = beside and cores > 1 and _can_copy()
        self._shared = shared
        self._begun: dict[Any, Future[Any]] = {}
        self._cores = cores
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
        self._begun[key] = _submit(self._pool, _run, function, args, kwargs)

    def count_idle(self) -> int:
        """Return how many copies have nothing to do."""
        if self._pool is None:
            return 0
        return max(0, self._cores - sum(not future.done() for future in self._begun.values()))

    def wait(self, function: Callable[..., Any], several: Sequence[tuple[Any, ...]]) -> int:
        """Return which of several that were begun is done, the first of them; where nobody works beside, the first.

        Parameters
        ----------
        function
            That was begun.
        several
            The arguments of each.
        """
        if self._pool is None:
            return 0
        futures = [self._begun[_find_key(function, args)] for args in several]
        wait_for(futures, return_when=FIRST_COMPLETED)
        return next(number for number, future in enumerate(futures) if future.done())

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
        if found == _CANNOT:
            return function(self._shared, *args, **kwargs)
        return found


def ask_copy(function: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
    """Return what a function returns that asks CUDA, without this process beginning to use CUDA.

    Afterwards it can still be copied, and holds no memory of a GPU. Where it cannot be copied it is asked itself.
    """
    if not _can_copy():
        return function(*args, **kwargs)
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _follow_no_signals, (os.getpid(),)) as pool:
        found: Any = _submit(pool, _run_unbroken, function, args, kwargs).result()
    return function(*args, **kwargs) if found == _CANNOT else found


def _can_copy() -> bool:
    """Tell whether a copy of this process would work."""
    is_alone = not (uses_gpus() or has_process_group() or is_launched())
    return is_alone and "fork" in multiprocessing.get_all_start_methods()


def _submit(
    pool: ProcessPoolExecutor, function: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs
) -> Future[Answer]:
    with holding_signals_back(), warnings.catch_warnings():
        # Python warns of threads, which copies lack; those are torch's, and a copy that uses one thread needs none.
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        return pool.submit(function, *args, **kwargs)


@contextmanager
def holding_signals_back() -> Iterator[None]:
    """Let what signals raise be raised behind this block, in which processes are forked.

    Python calls its own functions around a fork, and passes over what they raise: Ctrl-C was lost there, and this
    process went on.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone they raise in
        yield
        return
    heard: list[int] = []
    raising = [number for number in ENDING if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in raising}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for caught in heard:
        signal.raise_signal(caught)


def _find_key(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function, repr(args)


def _make_pool(cores: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _begin_copy, (os.getpid(),))


def _begin_copy(parent: int) -> None:
    _follow_no_signals(parent)
    # The GPUs that are followed are pretended ones; autograd would begin a thread for each that is visible.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _follow_no_signals(parent: int) -> None:
    # A copy has no threads but its own; torch's workers of data loaders do the same.
    torch.set_num_threads(1)
    bind_copy(parent)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run_unbroken(function, (_shared, *args), kwargs)


def _run_unbroken(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _CANNOT if is_in_bad_fork() else function(*args, **kwargs)
