"""How long kernels and the links between GPUs take: the table that forecasts of time are read from.

    python workflows/benchmarks/kernel_rates.py --seconds 45 --result kernel_rates.json

All GPUs of the machine share the cases of kernels; with two or more the links are measured as well. Behind
``--seconds`` no further case is begun, and the result names those that are missing.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rate_convolutions import list_convolutions
from rate_passes import Prepared, RateCase, count_run, list_others, list_passes
from results import make_parser, write_result
from torch import nn
from workers import Worker, ask, count_gpus, number_jobs, serve, take_place

from volseg.device import triton_tiles
from volseg.device.graph import undisturbed
from volseg.device.peer.planes import LIMIT, PlaneMailbox
from volseg.device.peer.values import ValueMailbox
from volseg.estimate.trace import KernelRun
from volseg.losses.dice import passes as dice
from volseg.losses.dice.reference import Terms
from volseg.parallel import FastKernels
from volseg.profiling.calibration import describe_machine, measure_host, record, time_calls

Measured = dict[str, Any]
"""A row of the table: the fields of a ``KernelRun``, and ``seconds``."""


def main() -> None:
    """Measure by a process per GPU, and write one file."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=45, help="in which cases of kernels are begun")
    parser.add_argument("--gpus", type=int, help="all, unless told")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    begun = time.monotonic()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums by the switch itself need rights that not every host gives
    gpus = chosen.gpus or count_gpus()
    workers = [Worker(__file__) for _ in range(gpus)]
    parts = ask(workers, number_jobs({"seconds": chosen.seconds}, gpus), chosen.seconds + 300)
    if "error" in parts[0]:
        raise SystemExit(f"{parts[0]['error']}\n{parts[0]['log']}")
    links: list[Measured] = []
    failed = ""
    if gpus > 1:  # if the links fail, the kernels are kept
        found = ask(workers, [{}] * gpus, 300)[0]
        links, failed = found.get("links", []), found.get("error", "")
    for worker in workers:
        worker.end()
    result = {
        "machine": parts[0]["machine"],
        "host": parts[0]["host"],
        # Copies last, when no other process has a kernel that waits on the other GPU.
        "links": [*links, *measure_copies()],
        "rows": [row for part in parts for row in part["rows"]],
        "left_out": {name: why for part in parts for name, why in part["left_out"].items()},
        "failed": failed,
        "took_s": {"kernels": max(part["kernels_s"] for part in parts), "all": time.monotonic() - begun},
    }
    write_result(chosen.result, indent=None, **result)
    print(len(result["rows"]), "rows,", len(result["left_out"]), "left out,", result["took_s"], failed)


def answer(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Measure this GPU's share of the cases, then, if asked, the links together with the others."""
    job = next(messages)
    rank, gpus = job["number"], job["processes"]
    take_place(job)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    machine = describe_machine(device)
    begun = time.monotonic()
    host = {**measure_host(device), "slab": measure_slabs(device)} if rank == 0 else {}
    cases = [*list_loss_cases(), *list_cases()][rank::gpus]
    rows, left_out = measure_cases(cases, device, time.monotonic() + job["seconds"])
    found = {"machine": machine, "host": host, "rows": rows, "left_out": left_out}
    yield {**found, "kernels_s": time.monotonic() - begun}
    torch.cuda.empty_cache()
    for _ in messages:
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=90))
        yield {"links": measure_group(rank, gpus, device)}


def list_cases() -> list[RateCase]:
    """Return all cases in an order of which any beginning covers every kind."""
    cases = [*list_convolutions(), *list_passes(), *list_others()]
    if not triton_tiles.available():
        cases = [case for case in cases if "ours" not in case.name]
    random.Random(0).shuffle(cases)  # noqa: S311  (the same order everywhere: processes share the list)
    return cases


def describe_run(run: KernelRun, seconds: float) -> Measured:
    """Return a row as JSON keeps it."""
    return {**asdict(run), "dtype": str(run.dtype).removeprefix("torch."), "seconds": seconds}


def measure_cases(
    cases: Sequence[RateCase], device: torch.device, until: float
) -> tuple[list[Measured], dict[str, str]]:
    """Time the cases in their order until ``time.monotonic`` says ``until``; return rows, and why others have none."""
    rows: list[Measured] = []
    left_out: dict[str, str] = {}
    # Not what is left of another process's memory while it starts: half of what this GPU has.
    room = torch.cuda.get_device_properties(device).total_memory // 2
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        for case in cases:
            if time.monotonic() > until:
                left_out[case.name] = "no time was left"
            elif 2 * case.size > room:
                left_out[case.name] = f"takes {case.size / 2**30:.1f} GiB"
            else:
                try:
                    rows += [describe_run(run, time_calls(call, stream)) for run, call in case.prepare(device)]
                except Exception as fault:  # no such kernel on this GPU, too little memory: the others count
                    left_out[case.name] = f"{type(fault).__name__}: {fault}"[:300]
                    torch.cuda.synchronize()  # raises, where the GPU itself has failed
    return rows, left_out


BLOCKS, KERNELS_OF_A_BLOCK = 10, 9
"""Of a convolution, a norm and an activation on slabs: four kernels forward (the convolution, moments, coefficients,
scale and activation), five backward (these again, sums, coefficients, the input's gradient, the convolution's)."""


def measure_slabs(device: torch.device, steps: int = 20) -> float:
    """Return the host's seconds per kernel of a network on slabs that is small enough for the GPU to wait."""
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [nn.Conv3d(8, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()]
    model = FastKernels(nn.Sequential(*layers), device)
    x = torch.randn(1, 8, 8, 8, 8, device=device)
    times = []
    for _ in range(5 + steps):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[5:]) / (BLOCKS * KERNELS_OF_A_BLOCK)


LOGITS = ((2, 64), (3, 128), (14, 96), (3, 160))
"""Classes and side of the volumes."""


def prepare_loss(classes: int, side: int, device: torch.device) -> list[Prepared]:
    """Return the kernels of Dice plus cross entropy, which read logits and labels once."""
    logits = torch.randn(1, classes, *[side] * 3, device=device, dtype=torch.bfloat16)
    label = torch.randint(0, classes, (1, 1, *[side] * 3), device=device, dtype=torch.uint8)
    sums = dice.sums(logits, label, False)
    loss, slopes = dice.combine(sums, Terms(), logits.shape)
    return [
        (
            count_run("losses.dice.passes._sums_kernel", logits.dtype, (logits, label)),
            lambda: dice.sums(logits, label, False),
        ),
        (
            count_run("losses.dice.passes._combine_kernel", sums.dtype, (sums, loss)),
            lambda: dice.combine(sums, Terms(), logits.shape),
        ),
        (
            count_run("losses.dice.passes._gradient_kernel", logits.dtype, (logits, label, logits)),
            lambda: dice.gradient(logits, label, slopes, False),
        ),
    ]


def list_loss_cases() -> list[RateCase]:
    """Return the cases of the loss that has kernels of its own."""
    return [
        RateCase(
            f"dice of ours, {classes} classes, {side}^3", 8 * classes * side**3, partial(prepare_loss, classes, side)
        )
        for classes, side in LOGITS
    ]


# How long data take from GPU to GPU of this machine: halos, sums, copies, by size.
#
# Each process of a group measures with the others; what the slowest found counts. In eager calls, one behind the other,
# and recorded.


SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
"""Bytes."""

Link = dict[str, Any]
"""``kind``, ``way``, ``size`` in bytes that a device sends, ``devices`` and ``seconds``."""


def _time(
    call: Callable[[], object], count: int, wait: Callable[[], object], meet: Callable[[], object] = lambda: None
) -> float:
    """Return seconds per call, started by Python one behind the other; ``wait`` comes before and behind them."""
    found = []
    for _ in range(4):
        meet()
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found[1:])


def _time_alone(call: Callable[[], object], count: int) -> float:
    """Return seconds per call of one process: a copy between GPUs cannot be recorded on the stream of one of them."""
    return _time(call, count, lambda: [torch.cuda.synchronize(device) for device in range(torch.cuda.device_count())])


def _time_together(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Return seconds per call of the slowest process."""
    own = _time(call, count, partial(torch.cuda.synchronize, device), partial(dist.barrier, device_ids=[device.index]))
    slowest = torch.tensor(own, device=device, dtype=torch.float64)
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
    if torch.cuda.device_count() > 1:
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


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(answer)
    main()
