"""Put kernels into the table of rates that were timed within whole steps, where nothing else has timed them.

A profiler tells how long all launches of a kernel took in a recorded step (``plan_accuracy.py``: ``kernels_us``), and
the step that is followed tells which tensors each was given. What a name took is shared out among the launches that are
followed by their rooflines, the gap between kernels first::

    python workflows/benchmarks/kernel_rates_of_steps.py accuracy.json volseg/estimate/tables/h200.json.gz

replaces what the table had from steps, and what it had of kernels of ours that are other code since it was measured.
What was timed by itself is better known, and stays: of such shapes steps add nothing.
"""

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from kernel_rates import describe_run
from plan_accuracy_compared import WAYS, build_work
from plan_accuracy_rows import Row

from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import KINDS, GpuKind
from volseg.estimate.roofline import classify, read_run
from volseg.estimate.step_time import select_step
from volseg.estimate.trace import KernelRun

OWN = {
    "attention_kernel": ("attention_kernels.attention_kernel",),
    "attention_query_kernel": ("attention_kernels.attention_query_kernel",),
    "attention_key_kernel": ("attention_kernels.attention_key_kernel",),
    "attention_term_kernel": ("attention_kernels.attention_term_kernel",),
    "_depthwise_kernel": ("convolution.depthwise._depthwise_kernel",),
    "_depthwise_weight_kernel": ("convolution.depthwise._depthwise_weight_kernel",),
    "_convolve_few_kernel": ("convolution.few_channels._convolve_few_kernel",),
    "_exchange_coefficients_kernel": ("norm.exchanged._exchange_coefficients_kernel",),
    "_exchange_backward_kernel": ("norm.exchanged._exchange_backward_kernel",),
    "_layer_norm_kernel": ("layer_norm._layer_norm_kernel",),
    "_layer_norm_backward_kernel": ("layer_norm._layer_norm_backward_kernel",),
    "_moments_kernel": ("norm.statistics._moments_kernel",),
    "_sums_kernel": ("norm.passes._sums_kernel", "norm.addition_passes._sums_kernel"),
    "_copy_kernel": ("layout._copy_kernel",),
    "_forward_kernel": tuple(
        f"convolution.{name}._forward_kernel" for name in ("few_in", "few_out", "few_taps", "one_voxel")
    ),
    "_weight_kernel": tuple(f"convolution.{name}._weight_kernel" for name in ("few_in", "few_taps", "many_taps")),
    "_backward_kernel": ("convolution.one_voxel._backward_kernel",),
}
"""Our kernels by the names that a profiler and a trace have for them."""

CHANGED = ("norm.statistics._moments_kernel", "norm.passes._sums_kernel")
"""Kernels that are other code since they were measured by themselves. Of others what was measured so stays."""

STEPS = "recorded steps"
LARGE = 4 * 2**20
"""Bytes, below which a kernel says little of how fast it is."""

Shapes = set[tuple[str, tuple[float, ...]]]
"""Families, and shapes within them."""


def follow(row: Row, kind: GpuKind) -> list[KernelRun]:
    """Return the kernels of a configuration's step."""
    candidate = Candidate(**{name: row[name] for name in WAYS})
    (trace,) = trace_candidate(build_work(row), candidate, kind, time_kernel=kind.seconds)
    return [event for event in select_step(trace.events) if isinstance(event, KernelRun)]


def list_groups(row: Row, runs: Sequence[KernelRun]) -> Iterator[tuple[list[KernelRun], float]]:
    """Yield launches whose seconds are known together, and these."""
    told = row["kernels_us"]
    for name, ours in OWN.items():
        mine = [run for run in runs if run.name in ours]
        yield mine, _add_up(told, lambda each, name=name: each == name, mine)


def _add_up(told: Sequence[tuple[str, int, float]], is_one: Any, runs: Sequence[KernelRun]) -> float:
    """Return the seconds of launches by a name; 0 where as many were not followed."""
    found = [(count, us) for name, count, us in told if is_one(name)]
    count = sum(each for each, _ in found)
    us = sum(each for _, each in found)
    if runs:
        print(f"    {runs[0].name}: {count} launches, {len(runs)} followed, {us:.0f} us")
    near = bool(runs) and abs(count - len(runs)) <= 0.2 * len(runs)
    return us * 1e-6 * len(runs) / count if near and count else 0.0


def share_out(
    runs: Sequence[KernelRun], seconds: float, kind: GpuKind, gap: float, known: Shapes
) -> Iterator[tuple[KernelRun, float]]:
    """Yield each launch of unknown shape with its part of the seconds: the gap, and the rest by the rooflines."""
    unknown = [run for run in runs if not known.intersection(list_shapes(run))]
    seconds -= sum(kind.seconds(run) for run in runs if known.intersection(list_shapes(run)))
    bounds = [sum(kind.peaks.bound(kernel) for kernel in classify(run)) + _find_written(run, kind) for run in unknown]
    beyond = seconds - gap * len(unknown)
    for run, bound in zip(unknown, bounds, strict=True):
        if beyond > 0:
            yield run, gap + beyond * bound / sum(bounds)


def _find_written(run: KernelRun, kind: GpuKind) -> float:
    """Return the seconds to write what is added to in place, which a trace counts once."""
    return prod(run.shapes[0]) * run.dtype.itemsize / kind.peaks.bandwidth if run.name.startswith("aten.add_") else 0.0


def find_rows(rows: Sequence[Row], kind: GpuKind, gap: float, known: Shapes) -> list[Row]:
    """Return rows of the table, one for each kernel and its tensors."""
    found: dict[KernelRun, list[float]] = defaultdict(list)
    for row in rows:
        if "kernels_us" in row:
            print(row["name"])
            for runs, seconds in list_groups(row, follow(row, kind)):
                if seconds:
                    for run, its in share_out(runs, seconds, kind, gap, known):
                        found[replace(run, stream=0)].append(its)
    # What torch has of one type in small tensors only says nothing of large ones: those of the other type stand for it.
    most: dict[str, int] = defaultdict(int)
    for run in found:
        (kernel,) = classify(run)
        most[kernel.family] = max(most[kernel.family], run.bytes_moved)
    told = [run for run in found if not run.name.startswith("aten.") or most[classify(run)[0].family] >= LARGE]
    return [{**describe_run(run, sum(found[run]) / len(found[run])), "source": STEPS} for run in told]


def list_shapes(run: KernelRun) -> list[tuple[str, tuple[float, ...]]]:
    """Return the families and shapes that a kernel is one of."""
    return [(kernel.family, kernel.shape) for kernel in classify(run)]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("table", type=Path)
    chosen = parser.parse_args()
    table = json.loads(gzip.decompress(chosen.table.read_bytes()))
    kept = [row for row in table["rows"] if row.get("source") != STEPS and row["name"] not in CHANGED]
    known = {shape for row in kept for shape in list_shapes(read_run(row))}
    measured = json.loads(chosen.result.read_text(encoding="utf-8"))["rows"]
    rows = find_rows(measured, KINDS["h200"], table["host"]["graph"], known)
    table["rows"] = [*kept, *rows]
    chosen.table.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":")).encode(), mtime=0))
    print(f"{len(kept)} rows kept, {len(rows)} of steps")


if __name__ == "__main__":
    main()
