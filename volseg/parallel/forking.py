"""Call a function in forks of this process: they share its network and imports, and send plain results.

A process forks only if it has not initialised CUDA and is not one of several: CUDA does not survive a fork, and the
threads of collectives would be copied mid-call. Any other process does the work itself.
"""

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ParamSpec, TypeVar

import torch

from volseg.device.gpus import uses_gpus
from volseg.device.torch_internals import is_in_bad_fork
from volseg.errors import ParallelError
from volseg.lifetime import bind_copy
from volseg.parallel.devices import has_process_group, is_launched
from volseg.signals import deferring_signals

Asked = ParamSpec("Asked")
Argument = TypeVar("Argument")
Answer = TypeVar("Answer")

_function: Any = None
"""Function that the workers call; it may hold a network, which forks inherit without pickling."""

_CANNOT = "this copy has a broken CUDA"
"""Answer of a worker instead of a result if its parent had initialised CUDA without torch's knowledge."""


def map_in_copies(
    function: Callable[[Argument], Answer], arguments: Sequence[Argument], processes: int, *, hides_gpus: bool = True
) -> list[Answer]:
    """Return the results of a function for each argument, computed in this many forks if this process can fork.

    Raises
    ------
    ParallelError
        If a worker was killed.
    """
    global _function
    if not processes or not _can_copy():
        return [function(argument) for argument in arguments]
    others, _function = set(multiprocessing.active_children()), function
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, _begin_copy, (os.getpid(), hides_gpus))
    try:
        # Python calls its own functions around a fork and ignores their exceptions: Ctrl-C was lost there.
        with deferring_signals(), warnings.catch_warnings():
            # Python warns about threads, which forks lack; these are torch's, and a fork with one thread needs none.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            futures = [pool.submit(_run, argument) for argument in arguments]
        found = [future.result() for future in futures]
    except BrokenProcessPool as fault:
        raise ParallelError(
            "a worker process died: it was killed, perhaps by the OOM killer, or the network ends its process; plan "
            "for one GPU to see which"
        ) from fault
    finally:
        _function = None
        for copy in set(multiprocessing.active_children()) - others:
            copy.kill()  # it holds no resources, and may be in the middle of a step
        pool.shutdown(cancel_futures=True)
    return [
        function(argument) if answer == _CANNOT else answer for argument, answer in zip(arguments, found, strict=True)
    ]


def ask_copy(function: Callable[Asked, Answer], *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
    """Return the result of a function that queries CUDA, without initialising CUDA in this process.

    Afterwards this process can still fork, and holds no GPU memory. A process that cannot fork calls the function
    itself.
    """
    return map_in_copies(lambda _: function(*args, **kwargs), [None], 1, hides_gpus=False)[0]


def _can_copy() -> bool:
    """Return whether a fork of this process would work."""
    is_alone = not (uses_gpus() or has_process_group() or is_launched())
    return is_alone and "fork" in multiprocessing.get_all_start_methods()


def _begin_copy(parent: int, hides_gpus: bool) -> None:
    # A fork has only its own thread; torch's data loader workers do the same.
    torch.set_num_threads(1)
    gc.freeze()  # otherwise a million imported objects are searched for cycles again and again
    bind_copy(parent)
    if hides_gpus:  # autograd would start a thread for each visible GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _run(argument: Any) -> Any:
    return _CANNOT if is_in_bad_fork() else _function(argument)
