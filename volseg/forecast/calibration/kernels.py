"""How long kernels take on this machine: the table that forecasts of time are read from.

A kernel is recorded several times over in one CUDA graph and timed by events around its replay, so that what Python
takes to start it does not count. What Python takes is measured apart, and so is what travels between two GPUs. Medians;
everything has run before it is timed.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device import triton_tiles
from volseg.device.gpus import count_gpus
from volseg.device.graph import Graph
from volseg.device.norm import passes
from volseg.forecast.calibration.cases import RateCase
from volseg.forecast.trace import KernelRun

__all__ = ["Measured", "describe_machine", "measure_cases", "measure_host", "record", "time_calls", "time_once"]

Measured = dict[str, Any]
"""A row of the table: the fields of a ``KernelRun``, and ``seconds``."""

WANTED_S = 0.002
"""Of kernels in a recording: long beside the start of a replay."""

MOST_CALLS, MOST_REPLAYS = 100, 5

LONGEST_S = 0.1
"""A kernel that takes longer is not recorded; nor are more replays of one than fit in here."""


def time_once(call: Callable[[], object]) -> float:
    """Return the device's seconds for a call on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def record(call: Callable[[], object], count: int, stream: torch.cuda.Stream) -> Graph:
    """Return a recording of some calls, on a stream on which the call has run: libraries keep workspaces per stream.

    Not within ``undisturbed``, whose collection of garbage takes longer than what is timed.
    """
    torch.cuda.synchronize()
    graph = Graph(stream)
    graph.begin()
    try:
        for _ in range(count):
            call()
    finally:
        graph.end()
    return graph


def time_calls(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Return seconds of a call's kernels, without the host's share; ``stream`` is the current one."""
    call()
    first = min(time_once(call) for _ in range(2))
    if first > LONGEST_S:
        return first
    count = max(1, min(MOST_CALLS, round(WANTED_S / first)))
    graph = record(call, count, stream)
    graph.replay()
    replays = max(1, min(MOST_REPLAYS, round(LONGEST_S / (first * count))))
    seconds = statistics.median(time_once(graph.replay) for _ in range(replays)) / count
    graph.release()
    return seconds


def describe_run(run: KernelRun, seconds: float) -> Measured:
    """Return a row as JSON keeps it."""
    return {**asdict(run), "dtype": str(run.dtype).removeprefix("torch."), "seconds": seconds}


def measure_cases(
    cases: Sequence[RateCase], device: torch.device, until: float
) -> tuple[list[Measured], dict[str, str]]:
    """Time the cases one by one.

    Parameters
    ----------
    cases
        In the order in which they are wanted.
    device
        A GPU, which does nothing else meanwhile.
    until
        When to stop, on the clock of ``time.monotonic``.

    Returns
    -------
    tuple
        The rows, and why other cases have none.
    """
    rows: list[Measured] = []
    left_out: dict[str, str] = {}
    # Not what is left of another process's memory while it starts: half of what this GPU has.
    room = torch.cuda.get_device_properties(device).total_memory // 2
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)), _no_collection():
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: graphs and events that go while another graph is recorded would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _time_host(call: Callable[[], object], count: int = 200) -> float:
    """Return the host's seconds per call, the device never being waited for in between."""
    for _ in range(20):
        call()
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
    torch.cuda.synchronize()
    return statistics.median(found)


def _go_back(chain: nn.Module, x: Tensor, gradient: Tensor) -> None:
    chain(x).backward(gradient)


def measure_host(device: torch.device) -> dict[str, float]:
    """Return seconds of the host per operator of an eager step, and of the device per kernel of a replayed one.

    ``forward`` and ``backward`` of ``convolution``, ``norm`` and ``pointwise`` with autograd, in a network's modules;
    ``triton`` for a kernel of our own; ``operator`` without autograd; ``graph`` for the gap between replayed kernels.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        x = torch.randn(1, 8, 4, 4, 4, device=device, requires_grad=True)
        modules = {
            "convolution": nn.Conv3d(8, 8, 3, padding=1, device=device),
            "norm": nn.InstanceNorm3d(8, affine=True, device=device),
            "pointwise": nn.LeakyReLU(),
        }
        found = {}
        for name, module in modules.items():
            chain = nn.Sequential(*[module] * 10)
            ones = torch.ones_like(x)
            forward = _time_host(partial(chain, x), 20) / 10
            both = _time_host(partial(_go_back, chain, x, ones), 20) / 10
            found[f"{name} forward"], found[f"{name} backward"] = forward, both - forward
        with torch.autocast("cuda", dtype=torch.bfloat16):
            chain = nn.Sequential(*[modules["convolution"]] * 10)
            found["autocast convolution forward"] = _time_host(lambda: chain(x), 20) / 10
        plain = torch.randn(1, 8, 4, 4, 4, device=device)
        scale = torch.ones(1, 8, device=device)
        found["operator"] = _time_host(lambda: plain.add_(1))
        found["triton"] = _time_host(lambda: passes.affine(plain, scale, scale)) if triton_tiles.available() else 0.0
        count = 1000
        graph = record(lambda: plain.add_(1), count, stream)
        graph.replay()
        found["graph"] = statistics.median(time_once(graph.replay) for _ in range(5)) / count
        single = record(lambda: plain.add_(1), 1, stream)
        found["replay"] = _time_host(single.replay, 100)
    return found


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a table belongs to."""
    told = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "gpu": told.name,
        "capability": [told.major, told.minor],
        "processors": told.multi_processor_count,
        "total_memory": told.total_memory,
        "memory_of_driver": total,
        "free_at_start": free,
        "l2_bytes": getattr(told, "L2_cache_size", None),
        "gpus": count_gpus(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "float32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "convolution": torch.backends.cudnn.allow_tf32,
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
