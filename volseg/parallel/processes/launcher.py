"""Start one process per device on this machine, with torch's elastic launcher.

``torchrun`` on the command line does the same; this module is for programs that count devices first.
"""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from volseg.errors import ParallelError
from volseg.launched import OWN_ATTEMPTS, OWN_LAUNCHER
from volseg.parallel.devices import is_launched, name_place
from volseg.parallel.processes.first_error import is_lasting, read_cause

logger = logging.getLogger(__name__)


def is_worker() -> bool:
    """Return whether a launcher started this process (``torchrun``, or ``launch``)."""
    return is_launched()


def launch(command: Sequence[str], processes: int, *, max_restarts: int = 0) -> None:
    """Run ``python <command>`` in ``processes`` local processes, and wait for them.

    Each process gets torchrun's variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` ...). If one
    fails, the others are ended and all are restarted, up to ``max_restarts`` times. There is no restart after an error
    that would occur again, such as a config that cannot be run.

    Parameters
    ----------
    command
        Arguments for the Python interpreter, such as ``["-m", "volseg", "train", "config.yaml"]``.
    processes
        Number of processes; the local rank of each selects its device.
    max_restarts
        Number of restarts after failures.

    Raises
    ------
    ParallelError
        If a process fails: with the cause and the process; or if this process was itself launched.
    """
    if processes < 1 or max_restarts < 0:
        raise ParallelError(
            f"processes must be at least 1 and max_restarts at least 0, got {processes} and {max_restarts}"
        )
    if is_worker():
        raise ParallelError(
            f"this process is rank {os.environ.get('RANK')} of a launched job already and would start {processes} "
            "more; under torchrun leave out the number of GPUs"
        )
    variables = {OWN_LAUNCHER: str(os.getpid())}
    if "OMP_NUM_THREADS" not in os.environ and processes > 1:
        # One arithmetic thread per process unless the user chose: torchrun's rule, which spares shared cores.
        variables["OMP_NUM_THREADS"] = "1"
    for attempt in range(max_restarts + 1):
        with setting_variables({**variables, OWN_ATTEMPTS: str(attempt)}), _as_before():
            failure = _attempt(command, processes)
        if failure is None:
            return
        rank, first = failure.get_first_failure()
        cause = read_cause(first, name_place(rank, processes, first.local_rank))
        if attempt == max_restarts or is_lasting(first):
            raise ParallelError(cause + (f"; it was started {attempt + 1} times" if attempt else ""))
        logger.warning("%s; restarting all processes (restart %d of %d)", cause, attempt + 1, max_restarts)


def _attempt(command: Sequence[str], processes: int) -> ChildFailedError | None:
    """Run all processes once; torch's launcher would restart them after any error."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failure:
        return failure
    return None


@contextmanager
def setting_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which the processes inherit, and restore the old values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _as_before() -> Iterator[None]:
    """Restore signal handlers, and silence the failure log of torch's launcher: volseg's error contains it.

    The elastic launcher leaves its own handlers, which end this process at the next Ctrl-C.
    """
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
