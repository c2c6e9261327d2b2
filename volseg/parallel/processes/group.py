"""Start, supervise and leave the process group of a job."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from volseg.device.gpus import get_host_readable_device, host_values
from volseg.errors import ParallelError
from volseg.launched import Launch, read_launch
from volseg.lifetime import end_with_launcher
from volseg.parallel.devices import (
    get_own_device,
    get_process_rank,
    has_process_group,
    is_distributed,
    is_main_process,
    name_own_place,
    note_restarts,
    stay_on_cpu,
)
from volseg.parallel.processes.first_error import end_after, end_by
from volseg.parallel.processes.progress import exchange, report_progress
from volseg.parallel.processes.rendezvous import PrefixStore, Rendezvous, join_rendezvous, open_store
from volseg.parallel.processes.supervision import Cause, Supervision, name_machine

TIMEOUT = 600.0
"""Seconds without progress of any process after which the job is ended, unless a config says otherwise."""

FOREVER = timedelta(days=30)
"""Timeout of the backends: processes may wait for one that reads cases; `Supervision` finds hangs."""

SECONDS_OF_STORE = 30.0
"""Seconds for one answer of the store, whose machine may be gone."""


class _Joined:
    """The group that `start_group` has started."""

    rendezvous: Rendezvous | None = None
    supervision: Supervision | None = None
    serves: bool = False
    """Whether this process keeps the job's store."""
    has_met: bool = False


_joined = _Joined()

_message_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""For each group that is not on gloo, a gloo group of the same processes."""


def start_group(timeout: float = TIMEOUT, *, on_cpu: bool = False) -> None:
    """Join torch's default process group with the other processes of this job, if this process has not joined it.

    The backend is NCCL with GPUs, otherwise gloo. From then on a job of several processes is watched: see
    ``supervision``.

    Parameters
    ----------
    timeout
        Seconds for all processes to arrive, and later without progress of any of them, after which the job is ended.
    on_cpu
        Whether the processes compute on the CPU, and so use gloo, even on a machine with GPUs.

    Raises
    ------
    ParallelError
        If no launcher set the processes of the job, or they do not arrive.
    """
    if dist.is_initialized():
        return
    launch = read_launch()
    if launch is None:
        raise ParallelError(
            "no launcher started this process: start it by torchrun, by volseg.parallel.launch, or with srun in "
            "a step of several tasks"
        )
    end_with_launcher()
    stay_on_cpu(on_cpu)
    device = get_own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = open_store(launch, timeout, serve=True)
    _joined.serves = launch.rank == 0 and not launch.has_store
    about = {"where": name_own_place(), "machine": name_machine(), "pid": os.getpid()}
    with _limit_rendezvous(launch, timeout + SECONDS_OF_STORE):
        rendezvous = join_rendezvous(store, launch, about, timeout, first=not _joined.has_met)
    _joined.rendezvous, _joined.has_met = rendezvous, True
    note_restarts(rendezvous.restarts)
    report_progress("start")
    if launch.world_size > 1:
        connection = PrefixStore(f"volseg/{launch.run}", open_store(launch, SECONDS_OF_STORE))
        connection = PrefixStore(rendezvous.name, connection)
        _joined.supervision = Supervision(
            connection, launch.rank, rendezvous.members, timeout, end_by, keeps_store=_joined.serves
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", rendezvous.store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=FOREVER,
        device_id=device if device.type == "cuda" else None,
    )
    _report_errors()


def make_group(
    ranks: Sequence[int] | None = None, backend: str | None = None, *, local: bool = False
) -> dist.ProcessGroup:
    """Return a group of some of the processes, with the timeout of the default group; see ``dist.new_group``.

    Parameters
    ----------
    ranks
        Members; all processes by default.
    backend
        Backend; that of the default group by default.
    local
        Whether only the members call this function, instead of every process.
    """
    return dist.new_group(ranks, timeout=FOREVER, backend=backend, use_local_synchronization=local)


def make_groups(rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of every row of processes, as torch requires from each of them; return the group of this process.

    Raises
    ------
    ParallelError
        If this process is in no row.
    """
    own = None
    for row in rows:
        group = make_group(row)
        if get_process_rank() in row:
            own = group
    if own is None:
        raise ParallelError(f"process {get_process_rank()} is not in the mesh of ranks {list(rows)}")
    return own


def get_message_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group of the same processes for host tensors: the group itself, or one that the first call makes.

    All models share this group: torch frees no group before the last one.
    """
    if "cpu" in dist.Backend.backend_capability.get(dist.get_backend(group), ()):
        return group
    if group not in _message_groups:
        _message_groups[group] = make_group(dist.get_process_group_ranks(group), "gloo", local=True)
    return _message_groups[group]


def agree(yes: bool, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Return whether all processes of ``groups`` agree: one group per dim asks a whole mesh."""
    with host_values():
        vote = torch.tensor([int(yes)], device=get_host_readable_device(device))
        for group in groups:
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
        return bool(vote.item())


def largest_over_processes(value: int, device: torch.device) -> int:
    """Return the largest value over all processes, on each of them; wait for the slowest."""
    if not is_distributed():
        return value
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values.item())


def gather_over_processes(names: Sequence[str]) -> list[str]:
    """Return the distinct names of all processes, on each of them, in the order of the processes."""
    group = dist.group.WORLD if is_distributed() else None
    told = exchange(names, None if group is None else get_message_group(group))
    return list(dict.fromkeys(name for one in told for name in one))


def decide_together(decide: Callable[[], Any]) -> Any:
    """Return the main process's decision, a JSON value; every process calls this."""
    return json.loads(gather_over_processes([json.dumps(decide())] if is_main_process() else [])[0])


def leave_processes() -> None:
    """Leave the process group after all processes have finished; without a group, do nothing.

    Do not call this after a failure: it waits for the others, which may never arrive. Delete the models, batches and
    recordings of this process before: gloo's threads end with the last reference to a group.
    """
    if not has_process_group():
        return
    rendezvous = _joined.rendezvous
    if rendezvous is not None:  # supervised until here: late processes may hang
        report_progress("leave")
        rendezvous.store.set(f"arrived/{get_process_rank()}", "")
        _wait_for_all(rendezvous, "arrived")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    _message_groups.clear()
    gc.collect()  # a model holds reference cycles, and its groups
    rank = get_process_rank()
    dist.destroy_process_group()
    gc.collect()
    stop_watching()
    if rendezvous is None:
        return
    rendezvous.store.set(f"gone/{rank}", "")
    if _joined.serves:
        _wait_for_all(rendezvous, "gone", SECONDS_OF_STORE)
    _joined.rendezvous = None


def stop_watching() -> None:
    """Stop supervising this process: it has finished, or a signal ends it."""
    if _joined.supervision is not None:
        _joined.supervision.leave()
        _joined.supervision.stop()
        _joined.supervision = None


def get_supervision() -> Supervision | None:
    """Return the supervision of this process; None without one."""
    return _joined.supervision


@contextmanager
def _limit_rendezvous(launch: Launch, seconds: float) -> Iterator[None]:
    """End this process if the block exceeds the time limit: calls of an unreachable store have no timeout."""
    message = (
        f"process {launch.rank} of {launch.world_size} has had no answer from the job's store at {launch.address}:"
        f"{launch.port} for {seconds:g} s; the network to that machine is down, or that machine hangs"
    )
    clock = threading.Timer(seconds, end_by, (Cause(message=message, is_own=True),))
    clock.daemon = True
    clock.start()
    try:
        yield
    finally:
        clock.cancel()


def _report_errors() -> None:
    """End a script by `end_after` at an uncaught error, instead of in the teardown, which waits for pending work.

    Call this after torch has started a group: torch's hook captures what an earlier hook writes, and would lose it.
    """
    told = sys.excepthook

    def end(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
        if _joined.supervision is None or issubclass(kind, KeyboardInterrupt):
            told(kind, fault, trace)
        else:
            end_after(fault, _joined.supervision)

    sys.excepthook = end


def _wait_for_all(rendezvous: Rendezvous, what: str, seconds: float | None = None) -> None:
    """Wait until every process has set its key, up to the given number of seconds."""
    keys = [f"{what}/{rank}" for rank in range(len(rendezvous.members))]
    end = None if seconds is None else time.monotonic() + seconds
    while not rendezvous.store.check(keys) and (end is None or time.monotonic() < end):
        time.sleep(0.02)
