"""Fork workers from this process: they share its network and imports, and send plain results.

A process forks only if it has not initialised CUDA and is not one of several: CUDA does not survive a fork, and the
threads of collectives would be copied mid-call. Any other process does the work itself.
"""

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import torch

from volseg.device.gpus import uses_gpus
from volseg.device.torch_internals import is_in_bad_fork
from volseg.errors import ParallelError
from volseg.lifetime import bind_copy
from volseg.parallel.devices import has_process_group, is_launched
from volseg.signals import deferring_signals

Shared = TypeVar("Shared")
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

_shared: Any = None
"""Object on which the workers work; it contains a network, which forks inherit without pickling."""

_CANNOT = "this copy has a broken CUDA"
"""Answer of a worker instead of a result if its parent had initialised CUDA without torch's knowledge."""


class ForkedWorkers(Generic[Shared]):
    """Call functions of ``shared`` and further arguments, in one process per core.

    Parameters
    ----------
    shared
        First argument of every function.
    forks
        Whether to fork if possible: otherwise this process calls the function when the result is requested.
    """

    def __init__(self, shared: Shared, *, forks: bool) -> None:
        cores = os.cpu_count() or 1
        self._shared = shared
        self._begun: dict[Any, Future[Any]] = {}
        self._pool = _make_pool(cores, hides_gpus=True) if forks and cores > 1 and _can_copy() else None
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
                copy.kill()  # it holds no resources, and may be in the middle of a step
            self._pool.shutdown(cancel_futures=True)

    def begin(
        self, function: Callable[Concatenate[Shared, Asked], Answer], *args: Asked.args, **kwargs: Asked.kwargs
    ) -> None:
        """Start a call as soon as a worker is free; a result that is never requested is dropped."""
        key = function, repr(args)
        if self._pool is not None and key not in self._begun:
            self._begun[key] = _submit(self._pool, _run, function, args, kwargs)

    def ask(
        self, function: Callable[Concatenate[Shared, Asked], Answer], *args: Asked.args, **kwargs: Asked.kwargs
    ) -> Answer:
        """Return the result of a call.

        Raises
        ------
        ParallelError
            If the worker was killed.
        """
        self.begin(function, *args, **kwargs)
        future = self._begun.get((function, repr(args)))
        if future is None:
            return function(self._shared, *args, **kwargs)
        try:
            found: Answer = future.result()
        except BrokenProcessPool as fault:
            raise ParallelError(
                f"a worker process died during {args[0]}: it was killed, perhaps by the OOM killer, or the "
                "network ended the process; plan for one GPU to see which"
            ) from fault
        return function(self._shared, *args, **kwargs) if found == _CANNOT else found


def ask_copy(function: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
    """Return the result of a function that queries CUDA, without initialising CUDA in this process.

    Afterwards this process can still fork, and uses no GPU memory. If it cannot fork, it calls the function itself.
    """
    if not _can_copy():
        return function(*args, **kwargs)
    with _make_pool(1, hides_gpus=False) as pool:
        found: Any = _submit(pool, _run_unbroken, function, args, kwargs).result()
    return function(*args, **kwargs) if found == _CANNOT else found


def _can_copy() -> bool:
    """Return whether a fork of this process would work."""
    is_alone = not (uses_gpus() or has_process_group() or is_launched())
    return is_alone and "fork" in multiprocessing.get_all_start_methods()


def _submit(
    pool: ProcessPoolExecutor, function: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs
) -> Future[Answer]:
    # Python calls its own functions around a fork and ignores their exceptions: Ctrl-C was lost there.
    with deferring_signals(), warnings.catch_warnings():
        # Python warns about threads, which forks lack; these are torch's, and a fork that uses one thread needs none.
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        return pool.submit(function, *args, **kwargs)


def _make_pool(cores: int, *, hides_gpus: bool) -> ProcessPoolExecutor:
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(cores, fork, _begin_copy, (os.getpid(), hides_gpus))


def _begin_copy(parent: int, hides_gpus: bool) -> None:
    # A fork has only its own thread; torch's data loader workers do the same.
    torch.set_num_threads(1)
    gc.freeze()  # otherwise a million imported objects are searched for cycles again and again
    bind_copy(parent)
    if hides_gpus:  # autograd would start a thread for each visible GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run_unbroken(function, (_shared, *args), kwargs)


def _run_unbroken(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _CANNOT if is_in_bad_fork() else function(*args, **kwargs)
