"""Put kernels into the table of rates that were timed within whole steps, where nothing else has timed them.

A profiler tells how long all launches of a kernel took in a recorded step (``plan_accuracy.py``: ``kernels_us``), and
the step that is followed tells which tensors each was given. What a name took is shared out among the launches that are
followed by their rooflines, the gap between kernels first::

    python workflows/benchmarks/kernel_rates_of_steps.py accuracy.json volseg/estimate/tables/h200.json.gz

replaces what the table had from steps, and what it had of kernels of ours that are other code since it was measured.
What was timed by itself is better known, and stays: of such shapes steps add nothing.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kernel_rates import describe_run
from plan_accuracy_compared import WAYS, build_work
from plan_accuracy_rows import Row
from results import make_parser

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

Shapes = set[tuple[str, tuple[float, ...]]]
"""Families, and shapes within them."""


def follow(row: Row, kind: GpuKind) -> list[KernelRun]:
    """Return the kernels of a configuration's step."""
    candidate = Candidate(**{name: row[name] for name in WAYS})
    (trace,) = trace_candidate(build_work(row), candidate, kind, time_kernel=kind.seconds)
    return [event for event in select_step(trace.events) if isinstance(event, KernelRun)]


def list_groups(row: Row, runs: Sequence[KernelRun]) -> Iterator[tuple[list[KernelRun], float]]:
    """Yield launches whose seconds are known together, and these; 0 where as many were not followed."""
    for name, ours in OWN.items():
        mine = [run for run in runs if run.name in ours]
        found = [(count, us) for each, count, us in row["kernels_us"] if each == name]
        count, us = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0.0)
        if mine:
            print(f"    {mine[0].name}: {count} launches, {len(mine)} followed, {us:.0f} us")
        near = bool(mine) and abs(count - len(mine)) <= 0.2 * len(mine)
        yield mine, us * 1e-6 * len(mine) / count if near and count else 0.0


def share_out(
    runs: Sequence[KernelRun], seconds: float, kind: GpuKind, gap: float, known: Shapes
) -> Iterator[tuple[KernelRun, float]]:
    """Yield each launch of unknown shape with its part of the seconds: the gap, and the rest by the rooflines."""
    unknown = [run for run in runs if not known.intersection(list_shapes(run))]
    seconds -= sum(kind.seconds(run) for run in runs if known.intersection(list_shapes(run)))
    bounds = [sum(kind.peaks.bound(kernel) for kernel in classify(run)) for run in unknown]
    beyond = seconds - gap * len(unknown)
    for run, bound in zip(unknown, bounds, strict=True):
        if beyond > 0:
            yield run, gap + beyond * bound / sum(bounds)


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
    return [{**describe_run(run, sum(its) / len(its)), "source": STEPS} for run, its in found.items()]


def list_shapes(run: KernelRun) -> list[tuple[str, tuple[float, ...]]]:
    """Return the families and shapes that a kernel is one of."""
    return [(kernel.family, kernel.shape) for kernel in classify(run)]


def main() -> None:
    """Write the table."""
    parser = make_parser(__doc__)
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
