"""How near to memory's speed the norms' reductions run: statistics and the sums of the gradient, by size.

    python workflows/benchmarks/norm_reductions.py --result runs/norms_h200_reductions.json
    python workflows/benchmarks/norm_reductions.py --stages 1 3 4 --kinds leaky prelu gelu --result runs/stages.json

Volumes are bfloat16 and drawn several times, so that none is found in the GPU's cache. Printed for each row:
microseconds of ``_moments_kernel``, ``_sums_kernel`` and ``addition_passes._sums_kernel``, recorded, and the bytes
that they read in GB/s. ``--stages`` are those of ``triton_tiles``: 1 is a loop without loads ahead. Most of the time
is for compiling. ``--device cpu`` tries it with ``TRITON_INTERPRET=1``.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from volseg.device import triton_tiles
from volseg.device.norm import addition_passes, passes, statistics
from volseg.device.norm.activation import IDENTITY, Activation
from volseg.device.norm.term import Term
from volseg.files import replacing
from volseg.monitoring.environment import environment

__all__ = ["main"]

SHAPES = ((16, 128), (32, 128), (64, 128), (80, 128), (64, 64), (128, 32))
"""Channels, and voxels along each side."""

BYTES = 800_000_000
"""That are gone through before a volume is read again; more than any cache holds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="CHANNELSxSIDE", default=[f"{c}x{side}" for c, side in SHAPES])
    parser.add_argument("--kinds", nargs="+", default=["leaky"], choices=tuple(passes.KINDS), help="of activation")
    parser.add_argument("--layouts", nargs="+", default=["last"], choices=("last", "first"), help="of channels")
    parser.add_argument("--stages", nargs="+", type=int, default=[triton_tiles.STAGES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    usual = triton_tiles.STAGES
    try:
        for triton_tiles.STAGES in chosen.stages:
            for row in measure(chosen):
                rows.append({"stages": triton_tiles.STAGES, **row})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        triton_tiles.STAGES = usual
    report = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), "rows": rows}
    chosen.result.parent.mkdir(parents=True, exist_ok=True)
    with replacing(chosen.result) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield microseconds and GB/s of each kernel, shape, layout and activation.

    Parameters
    ----------
    chosen : argparse.Namespace
        What was asked for.
    """
    device = torch.device(chosen.device)
    for shape in chosen.shapes:
        channels, side = map(int, shape.split("x"))
        for layout in chosen.layouts:
            volumes = [draw(channels, side, layout, device) for _ in range(count_copies(channels * side**3, device))]
            pairs = [torch.rand(1, channels, device=device) for _ in range(3)]
            size = volumes[0].numel() * volumes[0].element_size()
            about = {"channels": channels, "side": side, "layout": layout}
            time_us = measure_us(statistics.compute_moments_of_parts, [(x,) for x in volumes])
            yield {**about, "kernel": "moments", "us": time_us, "GB_per_s": round(size / time_us / 1e3, 1)}
            for kind in chosen.kinds:
                activation = Activation(kind, 0.01)
                slope = torch.rand(channels, device=device) if kind == "prelu" else None
                sums = [(g, x, *pairs, activation, slope) for g, x in combine(volumes, 2)]
                time_us = measure_us(passes.gradient_sums, sums)
                row = {**about, "kernel": "sums", "kind": kind, "us": time_us}
                yield {**row, "GB_per_s": round(2 * size / time_us / 1e3, 1)}
                triples = combine(volumes, 3)
                added = [(g, Term(x, *pairs, activation, slope), Term(y, *pairs), IDENTITY) for g, x, y in triples]
                time_us = measure_us(addition_passes.add_sums, added)
                row = {**about, "kernel": "sums of two norms", "kind": kind, "us": time_us}
                yield {**row, "GB_per_s": round(3 * size / time_us / 1e3, 1)}


def draw(channels: int, side: int, layout: str, device: torch.device) -> torch.Tensor:
    """Return a volume of random numbers."""
    volume = torch.randn(1, channels, side, side, side, device=device, dtype=torch.bfloat16)
    return volume.contiguous(memory_format=torch.channels_last_3d) if layout == "last" else volume


def combine(volumes: Sequence[torch.Tensor], count: int) -> list[tuple[torch.Tensor, ...]]:
    """Return so many of the volumes at a time, each volume as long as possible after it was read last."""
    step = len(volumes) // count
    return [tuple(volumes[(i + j * step) % len(volumes)] for j in range(count)) for i in range(len(volumes))]


def count_copies(elements: int, device: torch.device) -> int:
    """Return how many volumes are drawn: at least the three that a kernel reads."""
    return 3 if device.type == "cpu" else max(4, min(64, BYTES // (2 * elements)))


def measure_us(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    """Return microseconds of a call, the least of five recordings that go through all sets of arguments."""
    call(*sets[0])
    if not sets[0][0].is_cuda:
        begin = time.perf_counter()
        call(*sets[0])
        return (time.perf_counter() - begin) * 1e6
    repeats = max(1, 12 // len(sets))
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(repeats):
            for arguments in sets:
                call(*arguments)
    found = []
    for _ in range(6):  # the first one warms up
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        recorded.replay()
        end_event.record()
        torch.cuda.synchronize()
        found.append(begin_event.elapsed_time(end_event) * 1e3 / (repeats * len(sets)))
    return round(min(found[1:]), 2)


if __name__ == "__main__":
    main()
