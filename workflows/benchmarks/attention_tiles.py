"""How large the tiles of attention's kernels should be: each kernel with each tile, on attention as networks have it.

    python workflows/benchmarks/attention_tiles.py --result tiles.json --seconds 60

Attention of UNETR (12 heads of 64 features, tokens of 128^3 and of 160 x 320 x 320 voxels, alone and beside a second
slab's keys) and windows of SwinUNETR (343 tokens, 16 features, a bias and a mask). Milliseconds are medians of five
runs of each kernel, and teraflops count the products alone. torch's own attention is timed beside those without terms.
Tiles are compiled first, by as many processes as there are cores. ``choose_tile`` is what the package takes.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device import attention
from volseg.device.attention import Addend, Tile
from volseg.monitoring.environment import environment

SHAPES = {
    "UNETR 128^3": (12, 512, 512, 64, 0, 1),
    "UNETR 128^3, of two": (12, 512, 1024, 64, 0, 1),
    "UNETR 160 x 320 x 320": (12, 4000, 4000, 64, 0, 1),
    "UNETR 160 x 320 x 320, of two": (12, 4000, 8000, 64, 0, 1),
    "SwinUNETR 128^3, first level": (3, 343, 343, 16, 2, 1000),
    "SwinUNETR 128^3, third level": (12, 343, 343, 16, 2, 27),
}
"""Heads, queries, keys, features, terms, and windows."""

TILES = [
    Tile(own, others, warps, stages)
    for own, others, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    if not (own == 64 and others == 128 and stages == 3)
]
KERNELS = "result", "query", "key"


def main() -> None:
    """Compile, time and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60, help="after which no shape is begun")
    parser.add_argument("--part", type=int, nargs=2, metavar=("NUMBER", "OF"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part is None:
        measure_all(chosen.result, chosen.seconds)
    else:
        compile_part(*chosen.part)


def measure_all(result: Path, seconds: float) -> None:
    """Have all tiles compiled, then time them shape by shape."""
    begin, count = time.monotonic(), len(os.sched_getaffinity(0))
    own = [sys.executable, __file__, "--result", str(result), "--part"]
    compiling = [subprocess.Popen([*own, str(number), str(count)]) for number in range(count)]
    assert [process.wait() for process in compiling] == [0] * count
    report: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "environment": environment()}
    report |= {"compiled_s": round(time.monotonic() - begin, 1), "shapes": {}}
    for name in SHAPES:
        if time.monotonic() - begin < seconds:
            report["shapes"][name] = measure(name)
            result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(name, summarise(report["shapes"][name]), flush=True)


def compile_part(number: int, count: int) -> None:
    """Have this process's share of the tiles compiled, into Triton's cache."""
    shapes = "UNETR 128^3", "SwinUNETR 128^3, third level"
    for place, (name, tile) in enumerate(itertools.product(shapes, TILES)):
        if place % count == number:
            for _, run in kernels(name, tile):
                try_it(run)


def make(name: str) -> tuple[Tensor, Tensor, Tensor, list[Addend]]:
    """Return queries, keys and values, as a network that projects them together has them, and terms."""
    heads, rows, columns, features, terms, windows = SHAPES[name]

    def project(tokens: int) -> Tensor:
        together = torch.randn(windows, tokens, heads, features, device="cuda", dtype=torch.bfloat16)
        return together.transpose(1, 2)

    bias = torch.randn(heads, rows, columns, device="cuda")
    mask = torch.zeros(windows, rows, columns, device="cuda")
    both = [Addend(bias, 1, heads), Addend(mask, heads, windows)]
    return project(rows), project(columns), project(columns), both[:terms]


def kernels(name: str, tile: Tile) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kernel with the tile; the gradients' kernels by a pass in which the other one has the usual tile."""
    query, key, value, terms = make(name)
    scale = query.shape[3] ** -0.5
    out, logs = attention.attend(query, key, value, terms, scale)
    gradient = torch.randn_like(out)
    usual = attention.choose_tile
    for kernel in KERNELS:

        def choose(asked: str, *rest: Any, kernel: str = kernel) -> Tile:
            return tile if asked == kernel else usual(asked, *rest)

        def run(kernel: str = kernel, choose: Callable[..., Tile] = choose) -> object:
            with patch.object(attention, "choose_tile", choose):
                if kernel == "result":
                    return attention.attend(query, key, value, terms, scale)
                given = gradient, query, key, value, out, logs, terms, scale, [False] * len(terms)
                return attention.differentiate(*given)

        yield kernel, run


def try_it(run: Callable[[], object]) -> str:
    """Run once; return why it cannot, if so: a tile may take more shared memory than there is."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as fault:  # of Triton, of several kinds: the row says which
        return f"{type(fault).__name__}: {str(fault)[:200]}"
    return ""


def measure(name: str) -> dict[str, Any]:
    """Return milliseconds and teraflops of each kernel with each tile."""
    heads, rows, columns, features, terms, windows = SHAPES[name]
    product = 2 * windows * heads * rows * columns * features
    flops = {"result": 2 * product, "query": 3 * product, "key": 4 * product}
    found: dict[str, Any] = {kernel: [] for kernel in KERNELS}
    for tile in TILES:
        for kernel, run in kernels(name, tile):
            row: dict[str, Any] = {"tile": [tile.own, tile.others, tile.warps, tile.stages]}
            if problem := try_it(run):
                found[kernel].append(row | {"failed": problem})
                continue
            ms = time_kernel(run, f"attention_{kernel}_kernel" if kernel != "result" else "attention_kernel")
            found[kernel].append(row | {"ms": round(ms, 4), "teraflops": round(flops[kernel] / ms / 1e9, 1)})
    if not terms:
        found["torch"] = time_torch(name)
    return found


def time_kernel(run: Callable[[], object], name: str) -> float:
    """Return the median milliseconds of one kernel in five runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    return statistics.median(event.device_time / 1e3 for event in profile.events() if event.name == name)


def time_torch(name: str) -> dict[str, float]:
    """Return the milliseconds of torch's own attention, forward and backward."""
    query, key, value, _ = make(name)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    gradient = None
    for _ in range(6):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(2_000_000)
        events[0].record()
        out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
        events[1].record()
        gradient = torch.randn_like(out) if gradient is None else gradient
        torch.autograd.grad(out, leaves, gradient)
        events[2].record()
        torch.cuda.synchronize()
        found["forward"].append(events[0].elapsed_time(events[1]))
        found["backward"].append(events[1].elapsed_time(events[2]))
    return {part: round(statistics.median(ms[1:]), 4) for part, ms in found.items()}


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Return the best tiles of each kernel, beside the usual one."""
    best = {
        kernel: [
            [row["ms"], row["teraflops"], *row["tile"]]
            for row in sorted((row for row in found[kernel] if "ms" in row), key=lambda row: row["ms"])[:4]
        ]
        for kernel in KERNELS
    }
    return best | {"torch": found.get("torch")}


if __name__ == "__main__":
    main()
