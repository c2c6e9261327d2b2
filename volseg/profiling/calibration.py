"""Measure a GPU of this machine once: its factor for each kind of kernel, and Python's time per operator.

A few operators of every kind are timed, and each kind gets one factor: measured seconds over estimated seconds. Ratios
between kernels of different shapes are those of the H200's table. An operator is captured several times in one CUDA
graph and timed by events around a replay, so Python's time to launch it does not count.
"""

import gc
import json
import logging
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device import triton_tiles
from volseg.device.gpus import count_gpus
from volseg.device.graph import Graph
from volseg.device.norm import passes
from volseg.device.norm.activation import Term
from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import KINDS, GpuKind, name_group, read_host_rates
from volseg.estimate.operator_work import describe_kernel, list_tensors
from volseg.files import choose_user_cache, replacing

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the file's format."""

WANTED_S, LONGEST_S = 0.002, 0.1
"""Seconds of the kernels in a recording, long against the launch of a replay; and the limit above which a call is timed
without a recording."""

MOST_CALLS, MOST_REPLAYS = 100, 5

aten = torch.ops.aten

CONVOLUTIONS = ((32, 64, 3), (64, 32, 3), (128, 16, 3), (256, 8, 3), (16, 64, 5), (64, 16, 5), (64, 32, 1))
"""Channels in and out, sides of the volume and of the kernel."""

VOLUMES = ((32, 64), (32, 128), (128, 32))
"""Channels and side of the volumes on which passes over memory are timed."""

PRODUCTS = ((4096, 4096, 4096), (117_649, 48, 192), (2744, 192, 768))
"""Rows, inner and columns of matrix products."""

Call = tuple[Any, tuple[Any, ...]]
"""An operator and its arguments."""


def calibrate(device: torch.device, folder: str | Path | None = None) -> GpuKind:
    """Return this GPU with its stored rates, or measure them now; each version of torch has its own rates.

    Parameters
    ----------
    device
        A GPU that is otherwise idle.
    folder
        Folder of the stored rates: by default ``volseg/rates`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises
    ------
    ConfigError
        If the device is not a GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"only a GPU can be measured, got {device}; name a kind of GPU or a machine instead")
    machine = describe_machine(device)
    file = rates_file_path(machine["gpu"], machine["torch"], folder)
    stored = read_calibration(file, machine)
    if stored is None:
        logger.warning("measuring %s for about half a minute; this happens once", machine["gpu"])
        stored = {"version": VERSION, "machine": machine, "host": measure_host(device)}
        stored["factors"] = measure_factors(_find_base(machine), device)
        try:
            with replacing(file) as partial_file:
                partial_file.write_text(json.dumps(stored), encoding="utf-8")
        except OSError as fault:
            logger.warning("the rates cannot be stored (%s); the next command measures them again", fault)
    return describe_kind(stored)


def rates_file_path(gpu: str, version: str, folder: str | Path | None = None) -> Path:
    """Return the file of the rates of a GPU and a version of torch."""
    if folder is None:
        folder = os.path.join(choose_user_cache() or tempfile.gettempdir(), "rates")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu}-torch-{version}")
    return Path(folder, f"{name}.json")


def read_calibration(file: Path, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stored rates of a machine, or None; log a warning with the reason if they cannot be used."""
    wanted = {"version": VERSION, **{key: machine[key] for key in ("gpu", "torch", "cudnn")}}
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = {"version": stored["version"], **stored["machine"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as fault:
        logger.warning("%s cannot be read (%s): the GPU is measured again", file, fault)
        return None
    if differs := [key for key in wanted if found.get(key) != wanted[key]]:
        words = ", ".join(f"{key} {found.get(key)} instead of {wanted[key]}" for key in differs)
        logger.warning("%s does not fit this machine (%s): the GPU is measured again", file, words)
        return None
    return stored


def describe_kind(stored: Mapping[str, Any]) -> GpuKind:
    """Return the measured GPU as a kind."""
    machine = stored["machine"]
    return replace(
        _find_base(machine),
        memory=machine["total_memory"],
        source=f"measured here on {machine['date']} with torch {machine['torch']}",
        factors=stored["factors"],
        host=read_host_rates(stored["host"]),
    )


def _find_base(machine: Mapping[str, Any]) -> GpuKind:
    """Return the kind that the factors refer to; for an unknown GPU, an H200 with its number of multiprocessors."""
    known = next((kind for kind in KINDS.values() if kind.name == machine["gpu"]), None)
    like = known or replace(KINDS["h200"], name=machine["gpu"], capability=tuple(machine["capability"]), measured=False)
    return replace(like, processors=machine["processors"])


def measure_factors(base: GpuKind, device: torch.device) -> dict[str, float]:
    """Return measured over estimated seconds by group of kernels (`name_group`)."""
    found: dict[str, list[float]] = {}
    dtypes = torch.bfloat16 if base.takes_bfloat16() else torch.float16, torch.float32
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        for dtype in dtypes:
            for operator, args in _list_calls(dtype, device):
                run = describe_kernel(operator, args, {}, list_tensors(args), operator(*args), 0)
                assert run is not None
                seconds = time_calls(partial(operator, *args), stream)
                found.setdefault(name_group(run), []).append(seconds / base.seconds(run))
    return {group: statistics.median(factors) for group, factors in found.items()}


def _list_calls(dtype: torch.dtype, device: torch.device) -> Iterator[Call]:
    """Yield convolutions with their gradients, passes over memory and products of matrices, on noise.

    Zeros would let matrix units run at a higher clock.
    """
    draw = partial(torch.randn, device=device, dtype=dtype)
    for channels, side, kernel in CONVOLUTIONS:
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            slab = draw(1, channels, side, side, side).to(memory_format=layout)
            weight = draw(channels, channels, kernel, kernel, kernel).to(memory_format=layout)
            settings = [1] * 3, [kernel // 2] * 3, [1] * 3, False, [0] * 3, 1
            yield aten.convolution.default, (slab, weight, None, *settings)
            yield aten.convolution_backward.default, (slab, slab, weight, None, *settings, [True, True, False])
    for channels, side in VOLUMES:
        x = draw(1, channels, side, side, side)
        yield from ((aten.add.Tensor, (x, x.clone())), (aten.clone.default, (x,)), (aten.leaky_relu.default, (x,)))
    for rows, inner, columns in PRODUCTS:
        yield aten.mm.default, (draw(rows, inner), draw(inner, columns))


def time_once(call: Callable[[], object]) -> float:
    """Return the device's seconds of one call on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def record(call: Callable[[], object], count: int, stream: torch.cuda.Stream) -> Graph:
    """Record repeated calls on a stream on which the call has run before, as libraries keep workspaces per stream."""
    torch.cuda.synchronize()
    collects = gc.isenabled()
    graph = Graph(stream)
    gc.disable()  # destroying other graphs and events during a capture breaks it
    try:
        graph.begin()
        for _ in range(count):
            call()
    finally:
        graph.end()
        if collects:
            gc.enable()
    return graph


def time_calls(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Return the seconds of a call's kernels, without the host's share; ``stream`` is the current stream."""
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


def _time_host(call: Callable[[], object], count: int = 200) -> float:
    """Return the host's seconds per call, without waiting for the device between calls."""
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


def measure_host(device: torch.device) -> dict[str, float]:
    """Return the host's seconds per operator of an eager step, and the device's per kernel of a replayed step.

    ``forward`` and ``backward`` of ``convolution``, ``norm`` and ``pointwise`` with autograd, in a network's modules;
    ``triton`` for one of volseg's kernels; ``operator`` without autograd; ``graph`` for a replayed kernel; ``replay``
    for the launch of a replay.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
        x = torch.randn(1, 8, 4, 4, 4, device=device, requires_grad=True)
        found = {}
        modules = {
            "convolution": nn.Conv3d(8, 8, 3, padding=1, device=device),
            "norm": nn.InstanceNorm3d(8, affine=True, device=device),
            "pointwise": nn.LeakyReLU(),
        }
        ones = torch.ones_like(x)
        for name, module in modules.items():
            chain = nn.Sequential(*[module] * 10)
            forward = _time_host(partial(chain, x), 20) / 10
            both = _time_host(partial(_go_back, chain, x, ones), 20) / 10
            found[f"{name} forward"], found[f"{name} backward"] = forward, both - forward
        plain, scale = torch.randn(1, 8, 4, 4, 4, device=device), torch.ones(1, 8, device=device)
        found["operator"] = _time_host(lambda: plain.add_(1))
        norm = Term(plain, None, scale, scale)
        found["triton"] = _time_host(lambda: passes.affine(norm)) if triton_tiles.available() else 0.0
        graph = record(lambda: plain.add_(1), 1000, stream)
        graph.replay()
        found["graph"] = statistics.median(time_once(graph.replay) for _ in range(5)) / 1000
        found["replay"] = _time_host(record(lambda: plain.add_(1), 1, stream).replay, 100)
    return found


def _go_back(chain: nn.Module, x: Tensor, gradient: Tensor) -> None:
    chain(x).backward(gradient)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the GPU and the versions for which measured rates hold."""
    told = torch.cuda.get_device_properties(device)
    return {
        "gpu": told.name,
        "capability": [told.major, told.minor],
        "processors": told.multi_processor_count,
        "total_memory": told.total_memory,
        "gpus": count_gpus(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
