"""Measure the pipeline beside its peers: speed against its own bound, memory per GPU, a timeline.

    python workflows/benchmarks/pipeline.py --output results.json            # everything, on all visible GPUs
    python workflows/benchmarks/pipeline.py --output results.json --parts check blocks
    python workflows/benchmarks/pipeline.py --output results.json --plot figure.svg --no-run

Rows run one after another in a worker process that is replaced when a row fails badly or outlasts its limit;
the JSON is rewritten after every row, and nothing begins after ``--limit-s``. A row is forward, loss, backward and
optimizer step in fp32 with TF32, the median of five after warming up.

Ours and its peers see the same batches. eisen-core's wrapper (0.0.9, measured if installed) computes less: it
drops the skips. A pipeline's bound is what its slowest stage and its fill allow: (m + p - 1) x slowest stage,
as the partition measured it, one micro-batch at a time; micro-batches that share a GPU may pass it. Times of fifty
epochs (450 batches) are extrapolated from the median step.

References
----------
.. [1] PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ResNet50 split over two GPUs, then
pipelined.
"""

import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pipeline_rows import check, measure
from results import ROW, Bar, draw_bars, make_parser, read_result, rectangle, text, write, write_result
from workers import FAILURES, IMPORT_S, Row, Worker, ask, count_gpus, serve

ROW_LIMIT_S = 60

BATCH = [32, 1, 64, 64, 64]
# Of a GPU's memory (H200: 139 GiB): less than the whole batch needs, enough for a half or a quarter of the layers.
TWO_SHARE, FOUR_SHARE = 0.14, 0.1

WHOLE = [260, 1, 64, 64, 64]

COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}
OTHERS = "#d9a441"

BARS = ("vnet", "peers", "blocks", "whole", "resnet", "swin")


def checks(counts: list[int]) -> Iterator[Row]:
    """Compare with the plain network in float64."""
    for net, channels in (("blocks4", 4), ("vnet-monai", 1)):
        for launch in ("eager", "graphs"):
            same = row(net=net, split=2, launch=launch, shape=[4, channels, 16, 16, 16])
            yield row(same, kind="ours", gpus=counts[-1])


def resnet(counts: list[int]) -> Iterator[Row]:  # noqa: ARG001 (two GPUs, as in the tutorial)
    """Repeat PyTorch's tutorial, and beside it ours."""
    same = row(net="resnet50", shape=[120, 3, 128, 128])
    yield row(same, kind="plain", gpus=1, split=None)
    for split in (20, 30, 40, 60):
        yield from ours(row(same, split=split), [2], ["graphs"])
    yield from (row(same, kind="tutorial", gpus=2, split=split) for split in (None, 10, 20, 30, 60))
    # 120 micro-batches of one sample take their time.
    yield row(same, kind="tutorial", gpus=2, split=1, warm=1, steps=2)
    yield from ours(row(same, split=30), [2], ["auto"])


def vnet(counts: list[int]) -> Iterator[Row]:
    """Repeat the article's experiment: a batch of 32 by micro-batches."""
    for net in ("vnet-monai", "vnet-eisen"):
        same = row(net=net, shape=BATCH)
        yield row(same, kind="plain", gpus=1, split=None)
        for split in (2, 4):
            yield from ours(row(same, split=split), counts, ["graphs"])
            if net == "vnet-eisen":  # MONAI's fails there: a child that takes a skip gets none
                yield from (row(same, kind="eisen", gpus=count, split=split) for count in counts)
        yield from ours(row(same, split=2), counts[-1:], ["eager"])


def peers(counts: list[int]) -> Iterator[Row]:
    """Train V-Net in every other way to use the GPUs, and with everything left to the planner."""
    for net in ("vnet-monai", "vnet-eisen"):
        for kind in ("data parallel", "ddp"):
            yield row(net=net, shape=BATCH, split=None, kind=kind, gpus=counts[-1])
    same = row(net="vnet-monai", shape=BATCH)
    yield from ours(row(same, split="auto"), counts[-1:], ["auto"])
    yield row(same, split=None, kind="spatial", gpus=counts[-1])


def blocks(counts: list[int]) -> Iterator[Row]:
    """Measure a network that can be divided evenly, of large and of small kernels."""
    for net, side in (("blocks32", 64), ("blocks16", 48)):
        same = row(net=net, shape=[32, int(net.removeprefix("blocks")), side, side, side], split=2)
        yield row(same, kind="plain", gpus=1)
        yield from ours(same, counts if side == 64 else counts[-1:], ["graphs"])
        if side == 64:
            yield from ours(same, counts[-1:], ["eager"])


def swin(counts: list[int]) -> Iterator[Row]:
    """Train a transformer where one GPU is not allowed enough memory."""
    same = row(net="swin", shape=[4, 1, 96, 96, 96], split=1, steps=3, warm=2)
    yield row(same, kind="plain", gpus=1)
    for count, fraction in ((2, TWO_SHARE), (4, FOUR_SHARE)):
        if count in counts:
            yield row(same, kind="plain", gpus=1, fraction=fraction)
            yield from ours(row(same, fraction=fraction), [count], ["eager"])


def timelines(counts: list[int]) -> Iterator[Row]:
    """Watch one step of every GPU."""
    same = row(net="vnet-monai", shape=BATCH, split=2, timeline=True, steps=3)
    yield from ours(same, counts[-1:], ["graphs", "eager"])


def whole(counts: list[int]) -> Iterator[Row]:
    """Take the whole data set as one batch."""
    for net in ("vnet-eisen", "vnet-monai"):
        same = row(net=net, shape=WHOLE, split=20, steps=3)
        yield from ours(same, counts[-1:], ["graphs"])
        yield row(same, kind="plain", gpus=1)
        if net == "vnet-eisen":
            yield row(same, kind="eisen", gpus=counts[-1])


PARTS = {
    "check": checks, "vnet": vnet, "blocks": blocks, "resnet": resnet,
    "swin": swin, "timeline": timelines, "peers": peers, "whole": whole,
}  # fmt: skip
"""Makers of rows, in the order of their worth."""


def rows(parts: list[str], gpus: int) -> Iterator[Row]:
    """Yield the measurements of the chosen parts."""
    counts = [count for count in (2, 4, 8) if count <= gpus]
    for part, make in PARTS.items():
        if part in parts and counts:
            yield from (row(found, part=part) for found in make(counts))


def row(same: Row | None = None, **fields: Any) -> Row:
    """Return a row, ``same`` with other or more ``fields``."""
    return {**(same or {}), **fields}


def ours(same: Row, counts: list[int], launches: list[str]) -> Iterator[Row]:
    """Yield ModelParallel's rows."""
    yield from (row(same, kind="ours", gpus=count, launch=launch) for count in counts for launch in launches)


def answer(messages: Iterator[Row]) -> Iterator[Row]:
    """Measure the rows that arrive; a failure ends the process, because it may leave the GPUs in disorder."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for row in messages:
        try:
            yield check(row) if row["part"] == "check" else measure(row)
        except torch.cuda.OutOfMemoryError as fault:
            if not row.get("fraction"):  # else the device was meant to be too small
                raise
            yield {"failed": str(fault)[:2000]}
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        gc.collect()
        torch.cuda.empty_cache()


def measure_all(todo: list[Row], output: Path, limit_s: float) -> list[Row]:
    """Measure rows one after another; keep ``output`` current."""
    found: list[Row] = []
    worker: Worker | None = None
    begun = time.monotonic()
    for row in todo:
        if time.monotonic() - begun > limit_s:
            break
        limit = ROW_LIMIT_S if worker else ROW_LIMIT_S + IMPORT_S
        worker = worker or Worker(__file__)
        [answer] = ask([worker], [row], limit)
        if answer.keys() & FAILURES:
            worker = None
        found.append(row | answer)
        write_result(output, rows=found)
    if worker:
        worker.end()
    return found


def describe(row: Row) -> str:
    """Return a row as one line."""
    name = f"{row['part']:9}{row['net']:12}{row['kind']:14}{row.get('launch', ''):7}"
    name += f"{row['gpus']} GPUs, split {row['split']!s:5}"
    if failed := row.get("error", row.get("failed")):
        return f"{name} failed: {failed.splitlines()[0][:150]}"
    if "ms" not in row:
        errors = f"{row['largest_output_error']:.1e}, {row['largest_relative_gradient_error']:.1e}"
        return f"{name} errors {errors}, recorded {row['recorded']}"
    tail = f"  {row['of_bound']:.0%} of its bound" if "of_bound" in row else ""
    return f"{name} {row['ms']:9.2f} ms  {row['samples_per_s']:8.1f}/s  {max(row['peak_gib']):6.2f} GiB{tail}"


def plot(found: list[Row], path: Path) -> None:
    """Draw one group of bars for each network and batch, then the timelines, in one SVG."""
    groups: dict[str, list[Bar]] = {}
    for row in (row for row in found if "ms" in row and row["part"] in BARS):
        how = "" if row["split"] is None else f", split {row['split']}"
        label = f"{row['kind']} {row.get('launch', '')} {row['gpus']} GPU{how}"
        told = f"{row['ms']:.1f} ms, {', '.join(f'{gib:.2f}' for gib in row['peak_gib'])} GiB"
        bar = Bar(label=label, size=row["ms"], colour=COLOURS.get(row["kind"], OTHERS), told=told)
        groups.setdefault(f"{row['net']}, batch of {' x '.join(map(str, row['shape']))}", []).append(bar)
    drawn, y = draw_bars(groups), ROW * (3 + sum(len(bars) + 2 for bars in groups.values()))
    for row in (row for row in found if row.get("timeline")):
        label = f"when each GPU computes in one step of {row['net']}, {row['launch']}, split {row['split']}"
        drawn.append(text(10, y, f"{label} ({row['ms']:.0f} ms)"))
        for gpu, busy in enumerate(row["timeline"]):
            y += ROW
            drawn.append(text(10, y, f"GPU {gpu}"))
            drawn += [rectangle(60 + 4 * i, y - 9, 4, 11, COLOURS["ours"], share) for i, share in enumerate(busy)]
        y += 2 * ROW
    write(path, [text(10, 14, "ms per step, and GiB on each GPU with recordings"), *drawn], 880, y)


def main() -> None:
    """Measure, print and draw."""
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="use so many")
    parser.add_argument("--limit-s", type=float, default=570, help="stop after so many seconds; what is done is kept")
    parser.add_argument("--plot", type=Path, help="SVG to draw")
    parser.add_argument("--no-run", action="store_true", help="only draw and print an existing output")
    chosen = parser.parse_args()
    if chosen.no_run:
        found = read_result(chosen.output)["rows"]
    else:
        found = measure_all(list(rows(chosen.parts, chosen.gpus)), chosen.output, chosen.limit_s)
    print("\n".join(map(describe, found)))
    if chosen.plot:
        plot(found, chosen.plot)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        serve(answer)
    main()
