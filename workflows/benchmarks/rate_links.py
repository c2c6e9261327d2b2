"""How long data take from GPU to GPU of this machine: halos, sums, copies, by size.

Each process of a group measures with the others; what the slowest found counts. In eager calls, one behind the other,
and recorded.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from volseg.device.gpus import count_gpus
from volseg.device.graph import undisturbed
from volseg.device.peer.planes import LIMIT, PlaneMailbox
from volseg.device.peer.values import ValueMailbox
from volseg.profiling.calibration import record

SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Bytes."""

Link = dict[str, Any]
"""``kind``, ``way``, ``size`` in bytes that a device sends, ``devices`` and ``seconds``."""


def _time_alone(call: Callable[[], object], count: int) -> float:
    """Return seconds per call of one process: a copy between GPUs cannot be recorded on the stream of one of them."""
    found = []
    for _ in range(4):
        for device in range(count_gpus()):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        for device in range(count_gpus()):
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found[1:])


def _time_together(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Return seconds per call of the slowest process, started by Python one behind the other."""
    found = []
    for _ in range(4):
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) / count)
    slowest = torch.tensor(statistics.median(found[1:]), device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _time_recorded(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Return seconds per call of the slowest process, of a recording of ``count`` calls."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), undisturbed():
        call()
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        graph = record(call, count, stream)
        seconds = _time_together(graph.replay, device, 3) / count
        graph.release()
    return seconds


def _exchange(planes: torch.Tensor, into: torch.Tensor, rank: int, size: int) -> None:
    """Send planes to both neighbours by NCCL, and receive theirs."""
    calls = []
    for other in (rank - 1, rank + 1):
        if 0 <= other < size:
            calls += [dist.P2POp(dist.isend, planes, other), dist.P2POp(dist.irecv, into, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def measure_group(rank: int, size: int, device: torch.device) -> list[Link]:
    """Return the rows of a group of processes with a GPU each; all call it, and get the same times."""
    rows: list[Link] = []

    def note(kind: str, way: str, sent: int, seconds: float) -> None:
        rows.append({"kind": kind, "way": way, "size": sent, "devices": size, "seconds": seconds})

    group = dist.group.WORLD
    assert group is not None
    for sent in SIZES:
        values, into = (torch.zeros(sent // 4, device=device) for _ in range(2))
        count = 20 if sent <= 2**22 else 5
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, values),
            "broadcast": partial(dist.broadcast, values, 0),
            "halo": partial(_exchange, values, into, rank, size),
        }
        for kind, call in calls.items():
            call()
            note(kind, "nccl", sent, _time_together(call, device, count))
            note(kind, "nccl recorded", sent, _time_recorded(call, device, count))
    mailbox = PlaneMailbox.connect(group, device)
    if mailbox is not None:
        for sent in (size for size in SIZES if size <= LIMIT):
            planes, before, behind = (torch.zeros(sent // 4, device=device) for _ in range(3))

            def call(planes: Any = planes, before: Any = before, behind: Any = behind) -> None:
                mailbox.start((planes, planes), (before, behind))()

            call()
            note("halo", "peer", sent, _time_together(call, device, 20))
            note("halo", "peer recorded", sent, _time_recorded(call, device, 20))
    values_box = ValueMailbox.connect(group, device)
    if values_box is not None:
        few = torch.zeros(512, device=device)
        note("values", "peer", 2048, _time_together(lambda: values_box.stack(few), device, 20))
        note("values", "peer recorded", 2048, _time_recorded(lambda: values_box.stack(few), device, 20))
    return rows


def measure_copies() -> list[Link]:
    """Return the rows of copies by one process: from GPU to GPU where there are two, to and from host memory."""
    rows: list[Link] = []
    ways = {"host to device": ("cpu", "cuda:0"), "device to host": ("cuda:0", "cpu")}
    if count_gpus() > 1:
        ways["peer"] = "cuda:0", "cuda:1"
    with torch.cuda.device(0):
        for sent in SIZES:
            for way, (one, other) in ways.items():
                source, target = (
                    torch.zeros(sent, dtype=torch.uint8, device=place, pin_memory=place == "cpu")
                    for place in (one, other)
                )
                seconds = _time_alone(partial(target.copy_, source, non_blocking=True), 20)
                rows.append({"kind": "copy", "way": way, "size": sent, "devices": 2, "seconds": seconds})
    return rows
