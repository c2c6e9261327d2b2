"""Start one process per device on this machine, with torch's own elastic launcher.

``torchrun`` on the command line does the same; this is for programs that count devices first.
"""

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from volseg.errors import ParallelError
from volseg.parallel.devices import is_launched

__all__ = ["is_worker", "launch"]


def is_worker() -> bool:
    """Say whether a launcher started this process (``torchrun``, or ``launch``)."""
    return is_launched()


def launch(command: Sequence[str], processes: int) -> None:
    """Run ``python <command>`` in ``processes`` local processes, and wait for them.

    Each gets torchrun's variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` ...). If one fails, the
    others are ended.

    Parameters
    ----------
    command
        Arguments for the Python interpreter, such as ``["-m", "volseg", "train", "config.yaml"]``.
    processes
        Number of processes; the local rank of each chooses its device.

    Raises
    ------
    ParallelError
        If a process fails: which one, how, and the command; or if this process is itself a launched one.
    """
    if processes < 1:
        raise ParallelError(f"processes must be at least 1, got {processes}")
    if is_worker():
        raise ParallelError(
            f"this process is rank {os.environ.get('RANK')} of a launched group already and would start {processes} "
            "more; under torchrun leave out the number of GPUs"
        )
    # One arithmetic thread per process unless the user chose: torchrun's rule, which spares shared cores.
    threads = {} if "OMP_NUM_THREADS" in os.environ or processes == 1 else {"OMP_NUM_THREADS": "1"}
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
    os.environ.update(threads)
    try:
        with _put_handlers_back():
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        raise ParallelError(
            f"process {rank} of {processes} failed with exit code {first.exitcode} and the others were ended; its own "
            f"output above says why (command: python {' '.join(command)})"
        ) from None
    finally:
        for name in threads:
            os.environ.pop(name, None)


@contextmanager
def _put_handlers_back() -> Iterator[None]:
    """Undo that the elastic launcher leaves its own signal handlers, which end this process at the next Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
