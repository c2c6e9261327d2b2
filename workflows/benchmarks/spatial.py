"""Measure spatial model parallelism: speed, scaling, memory, and the plain network beside it.

    python workflows/benchmarks/spatial.py --gpus 1 2 4 --output results.json

Rows of one number of GPUs run in one group of processes; after a failure the rest is started anew. Rows of the kind
`alone` train a network of its own on every GPU at the same time: what the GPUs of this host give together, for they
are not all equally fast. A row is forward, loss, backward and optimizer step in bf16 at batch 1, the median of several
steps. The JSON is rewritten after every row.

`--parts same` prints the peak of N GPUs against one Nth of that of one GPU, for the same volume; `--parts largest`
searches the largest cube that trains by whole steps that keep nothing they can recompute, and writes a table beside the
JSON. ``--device cpu --small`` tries the script without a GPU.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from networks_rows import MeasuredStep, find_device
from results import make_parser, write_result
from workers import Group, Row, count_gpus, serve


def answer(messages: Iterator[Row]) -> Iterator[Row]:
    """Measure the rows that arrive."""
    for row in messages:
        try:
            yield measure(row)
        except (RuntimeError, MemoryError) as fault:
            if not _is_out_of_memory(fault):
                raise
            yield {"out_of_memory": str(fault).partition("\n")[0][:300]}
        gc.collect()  # a step and its network hold one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(row: Row) -> Row:
    """Return time per step, memory and loss of one configuration, in this process."""
    begun = time.perf_counter()
    step = MeasuredStep(row, find_device(row))
    for number in range(row.get("warm", 5)):
        if step.records and number == step.run.warm_up:  # type: ignore[attr-defined]  # this call records
            torch.cuda.reset_peak_memory_stats()
        loss = step.run(step.image, step.label)
    first_loss, recorded, peak = float(loss), 0, 0
    if step.is_gpu:
        torch.cuda.synchronize()
        recorded = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(row.get("steps", 8)):
        begin = time.perf_counter()
        loss = step.run(step.image, step.label)
        if step.is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    if step.is_gpu:  # a graph's memory is in its private pool, reserved rather than allocated
        peak = torch.cuda.memory_reserved() if step.records else torch.cuda.max_memory_allocated()
    voxels, median = math.prod(row["sides"]), statistics.median(times)
    return {
        "ms": median,
        "ms_min": min(times),
        "ms_all": times,
        "mvoxel_per_s": voxels * row["gpus"] / median / 1e3,
        "peak_gib": peak / 2**30,
        "bytes_per_voxel": peak / voxels,
        # Of a graph: what was in use at once while it was recorded, without the gaps between.
        **({"used_bytes_per_voxel": recorded / voxels} if step.records else {}),
        "loss": first_loss,
        "loss_last": float(loss),
        "wall_s": time.perf_counter() - begun,
    }


def _is_out_of_memory(fault: BaseException) -> bool:
    # Libraries below torch, and torch on a CPU, raise a plain RuntimeError.
    told = str(fault).lower()
    return isinstance(fault, MemoryError) or "out of memory" in told or "can't allocate memory" in told


Ask = Callable[[Row, float], list[Row]]
"""Gives the answers of a row's processes within so many seconds."""


def measure_row(row: Row, ask: Ask, chosen: argparse.Namespace) -> Row:
    """Return a row with what its processes found."""
    if row["part"] == "largest":
        return row | search(row, ask, time.monotonic() + chosen.search)
    answers = ask(row, chosen.limit)
    if row["kind"] == "alone" and "ms" in answers[0]:
        each = [answer["ms"] for answer in answers]
        voxels = math.prod(row["sides"])
        return row | {"ms_each": each, "ms": max(each), "mvoxel_per_s": sum(voxels / ms for ms in each) / 1e3}
    return row | answers[0]


def search(row: Row, ask: Ask, until: float) -> Row:
    """Return the tries of a search, each in the cubes of one side.

    Where memory ends on one process the others wait in an exchange that has no answer: the next try has new processes.
    """
    tries: list[Row] = []
    # Memory per voxel is the same on any number of GPUs.
    first = max(1, round(FIRST * row["gpus"] ** (1 / 3) / row["multiple"])) * row["multiple"]
    while (side := next_side(tries, first, row["multiple"])) is not None and time.monotonic() < until:
        found = ask({**row, "sides": [side // row["gpus"], side, side]}, until - time.monotonic())[0]
        if "error" in found:
            return {"tries": tries, **found}
        tries.append({"side": side, "fits": "out_of_memory" not in found, **found})
    return {"tries": tries}


HIDDEN = ("ms_all", "kind", "steps", "tries", "trace", "log")
"""Fields of a row that the JSON has and the terminal has not."""

FIRST = 640
"""Side of the cube that a search tries first on one GPU (H200); another value costs tries, and changes no result."""


def next_side(tries: Sequence[Row], first: int, multiple: int) -> int | None:
    """Return the side to try next, or None where the largest is known.

    From the first guess in growing strides until one side fits and another does not, then by halves.
    """
    fitting = [attempt["side"] for attempt in tries if attempt["fits"]]
    failing = [attempt["side"] for attempt in tries if not attempt["fits"]]
    if not tries:
        return first
    low, high = max(fitting, default=0), min(failing, default=0)
    if not failing:
        return low + multiple * 2 ** (len(fitting) - 1)
    if high - low <= multiple:
        return None
    if not fitting:
        return max(multiple, high - multiple * 2 ** (len(failing) - 1))
    return low + (high - low) // multiple // 2 * multiple


def finished(row: Row) -> bool:
    """Say whether the search of this row has an answer."""
    tries = row.get("tries") or []
    return bool(tries) and next_side(tries, 0, row["multiple"]) is None


def _ends(row: Row) -> tuple[Row | None, int | None]:
    """Return the largest try that fitted, and the smallest side that did not."""
    tries = row.get("tries") or []
    fitting = max((attempt for attempt in tries if attempt["fits"]), key=lambda attempt: attempt["side"], default=None)
    return fitting, min((attempt["side"] for attempt in tries if not attempt["fits"]), default=None)


def table(found: Sequence[Row]) -> str:
    """Return the searches as a table in Markdown."""
    lines = [
        "| network | GPUs | largest cube | Mvoxel | GiB per GPU | bytes per voxel | s per step | did not fit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        best, above = _ends(row)
        refused = " ".join([f"{above}^3"] * bool(above) + ["(search not finished)"] * (not finished(row)))
        if best is None:
            lines.append(f"| {row['net']} | {row['gpus']} | none | | | | | {refused} |")
            continue
        side = best["side"]
        lines.append(
            f"| {row['net']} | {row['gpus']} | {side}^3 | {side**3 / 1e6:.0f} | {best['peak_gib']:.1f} "
            f"| {best['bytes_per_voxel']:.0f} | {best['ms'] / 1e3:.2f} | {refused} |"
        )
    return "\n".join(lines)


def same_volume(found: list[Row]) -> list[Row]:
    """Return the peak on N GPUs over one Nth of the peak on one, where both ran the same volume."""
    peaks = {
        (row["net"], row["gpus"]): row["peak_gib"] for row in found if row["part"] == "same" and row.get("peak_gib")
    }
    return [
        {"net": net, "gpus": gpus, "peak_over_share_of_one": peak * gpus / peaks[net, 1]}
        for (net, gpus), peak in peaks.items()
        if gpus > 1 and (net, 1) in peaks
    ]


def rows(gpus: list[int], chosen: set[str]) -> list[Row]:
    """Return what to measure, the most telling first; sides are those of each GPU's part."""
    found: list[Row] = []
    for net in ("DynUNet", "VNet"):
        found += [
            {"part": "plain", "kind": "plain", "net": net, "gpus": 1, "sides": [128] * 3, "channels_last": last}
            for last in (False, True)
        ]
    for net in ("DynUNet", "VNet"):
        for count in gpus:
            common = {"kind": "slabs", "net": net, "gpus": count}
            found += [
                {"part": "weak128", **common, "sides": [128] * 3, "record": True},
                {"part": "weak320", **common, "sides": [160, 320, 320], "record": True, "steps": 5},
                {"part": "strong256", **common, "sides": [256 // count, 256, 256], "record": True},
            ]
            if count > 1:
                each = {"kind": "alone", "net": net, "gpus": count, "record": True}
                found.append({"part": "alone128", **each, "sides": [128] * 3})
                found.append({"part": "alone320", **each, "sides": [160, 320, 320], "steps": 5})
            found.append({"part": "eager128", **common, "sides": [128] * 3})
            found.append({"part": "eager320", **common, "sides": [160, 320, 320], "steps": 4, "warm": 3})
            found.append({"part": "checkpoint", **common, "sides": [160, 320, 320], "checkpoint": "all"})
            found.append({"part": "tiled", **common, "sides": [160, 320, 320], "checkpoint": "tiled"})
            found.append({"part": "same", **common, "sides": [640 // count, 320, 320], "steps": 3, "warm": 3})
    for count in gpus:
        common = {"kind": "slabs", "net": "DynUNet", "gpus": count, "checkpoint": "all", "steps": 2, "warm": 1}
        found.append({"part": "huge", **common, "sides": [1024 // count, 512, 512]})
        found.append({"part": "largest", **common, "steps": 1, "multiple": 64})
    return [row for row in found if not chosen or row["part"] in chosen]


def main() -> None:
    """Run all rows and write the JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[count_gpus()])
    parser.add_argument("--parts", nargs="*", default=[])
    parser.add_argument("--nets", nargs="*", default=["DynUNet", "VNet"])
    parser.add_argument("--rows", help="JSON list of rows to run instead")
    parser.add_argument("--limit", type=float, default=30, help="seconds per row")
    parser.add_argument("--search", type=float, default=180, help="seconds per search of the largest cube")
    parser.add_argument("--total", type=float, default=500, help="seconds after which no row is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="narrow networks")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling.json"))
    chosen = parser.parse_args()
    listed = json.loads(chosen.rows) if chosen.rows else rows(chosen.gpus, set(chosen.parts))
    counts = list(dict.fromkeys(row["gpus"] for row in listed))
    waiting = sorted((row for row in listed if row["net"] in chosen.nets), key=lambda row: counts.index(row["gpus"]))
    group, begin, done = Group(__file__), time.monotonic(), list[Row]()
    for row in waiting:
        row |= {"network": row["net"], "small": chosen.small, "device": chosen.device, "gpu": 0}
        if time.monotonic() - begin > chosen.total:
            done.append(row | {"error": "not begun: out of time"})
            continue
        done.append(measure_row(row, lambda asked, seconds: group.ask(asked, asked["gpus"], seconds), chosen))
        told = {key: value for key, value in done[-1].items() if key not in HIDDEN}
        told |= {key: round(value, 3) for key, value in told.items() if isinstance(value, float)}
        print(json.dumps(told), flush=True)
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        write_result(chosen.output, allocator=allocator, rows=done, same_volume=same_volume(done))
        if searched := [row for row in done if row["part"] == "largest"]:
            chosen.output.with_suffix(".md").write_text(table(searched) + "\n", encoding="utf-8")
    group.end()
    for ratio in same_volume(done):
        print("same volume, peak over one GPU's share:", json.dumps(ratio))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(answer)
    main()
