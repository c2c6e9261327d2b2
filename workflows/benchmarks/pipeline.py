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

import argparse
import contextlib
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

# The folder of this script is on the path.
from pipeline_rows import Row, check, measure
from results import rectangle, text, write

PARTS = ("check", "vnet", "blocks", "resnet", "swin", "timeline", "peers", "whole")
ROW_LIMIT_S = 60
FAILED = 3
"""A worker's exit code after a row that failed, and was written down."""

BATCH = [32, 1, 64, 64, 64]
# Of a GPU's memory (H200: 139 GiB): less than the whole batch needs, enough for a half or a quarter of the layers.
TWO_SHARE, FOUR_SHARE = 0.14, 0.1

WHOLE = [260, 1, 64, 64, 64]

COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}
OTHERS = "#d9a441"

BARS, STEP = ("vnet", "peers", "blocks", "whole", "resnet", "swin"), 15
TIME_X, TIME_WIDTH, MEMORY_X, MEMORY_WIDTH = 200, 420, 690, 45


def rows(parts: list[str], gpus: int) -> Iterator[Row]:
    """Yield the measurements of the chosen parts."""
    counts = [count for count in (2, 4, 8) if count <= gpus]
    makers = {
        "check": checks,
        "resnet": resnet,
        "vnet": vnet,
        "blocks": blocks,
        "swin": swin,
        "timeline": timelines,
        "peers": peers,
        "whole": whole,
    }
    for part in PARTS:
        if part in parts and counts:
            yield from (row(found, part=part) for found in makers[part](counts))


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


def row(same: Row | None = None, **fields: Any) -> Row:
    """Return a row, ``same`` with other or more ``fields``."""
    return {**(same or {}), **fields}


def ours(same: Row, counts: list[int], launches: list[str]) -> Iterator[Row]:
    """Yield ModelParallel's rows."""
    yield from (row(same, kind="ours", gpus=count, launch=launch) for count in counts for launch in launches)


def work(todo: Path, done: Path) -> None:
    """Run the rows of ``todo``, adding each to ``done``; stop at a failure, which may leave the GPUs in disorder."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for row in json.loads(todo.read_text(encoding="utf-8")):
        failed = False
        try:
            result = check(row) if row["part"] == "check" else measure(row)
        except Exception as failure:
            # A device that was meant to be too small is no failure.
            failed = not (row.get("fraction") and isinstance(failure, torch.cuda.OutOfMemoryError))
            result = {"error": f"{type(failure).__name__}: {failure}"[:2000], "where": traceback.format_exc()[-1500:]}
        with done.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**row, **result}) + "\n")
        if failed:
            os._exit(FAILED)  # a broken capture or an exhausted device must not spoil the next row
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        gc.collect()
        torch.cuda.empty_cache()


def supervise(todo: list[Row], output: Path, limit_s: float) -> list[Row]:
    """Run all rows, a new worker after every failure; keep ``output`` current."""
    queue, lines = output.with_suffix(".todo"), output.with_suffix(".rows")
    lines.write_text("", encoding="utf-8")
    begun = time.monotonic()
    while (count := len(lines.read_text(encoding="utf-8").splitlines())) < len(todo):
        if time.monotonic() - begun > limit_s:
            break
        queue.write_text(json.dumps(todo[count:]), encoding="utf-8")
        command = [sys.executable, __file__, "--worker", str(queue), "--output", str(lines)]
        # A session of its own: replicas end with it.
        worker = subprocess.Popen(command, start_new_session=True)
        seen, since = count, time.monotonic()
        while worker.poll() is None:
            time.sleep(0.5)
            if (now := len(lines.read_text(encoding="utf-8").splitlines())) > seen:
                seen, since = now, time.monotonic()
                save(output, lines)
            if time.monotonic() - since > ROW_LIMIT_S or time.monotonic() - begun > limit_s:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        done = len(lines.read_text(encoding="utf-8").splitlines())
        is_late = time.monotonic() - begun > limit_s
        if worker.returncode not in (0, FAILED) and done < len(todo) and not is_late:
            error = f"the worker ended with {worker.returncode}, or the row took more than {ROW_LIMIT_S} s"
            with lines.open("a", encoding="utf-8") as more:
                more.write(json.dumps({**todo[done], "error": error}) + "\n")
    save(output, lines)
    with contextlib.suppress(OSError):
        queue.unlink()
    return json.loads(output.read_text(encoding="utf-8"))["rows"]


def save(output: Path, lines: Path) -> None:
    """Write what there is, with what it was measured on."""
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    command = [f"DIR/{Path(word).name}" if Path(word).is_absolute() else word for word in sys.argv]
    about = row(
        command=command, gpus=names, torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version()
    )
    output.write_text(
        json.dumps({"about": {**about, "cudnn": torch.backends.cudnn.version()}, "rows": found}, indent=1),
        encoding="utf-8",
    )


def describe(row: Row) -> str:
    """Return a row as one line."""
    name = f"{row['part']:9}{row['net']:12}{row['kind']:14}{row.get('launch', ''):7}"
    name += f"{row['gpus']} GPUs, split {row['split']!s:5}"
    if "error" in row:
        return f"{name} failed: {row['error'].splitlines()[0][:150]}"
    if "ms" not in row:
        errors = f"{row['largest_output_error']:.1e}, {row['largest_relative_gradient_error']:.1e}"
        return f"{name} errors {errors}, recorded {row['recorded']}"
    tail = f"  {row['of_bound']:.0%} of its bound" if "of_bound" in row else ""
    return f"{name} {row['ms']:9.2f} ms  {row['samples_per_s']:8.1f}/s  {max(row['peak_gib']):6.2f} GiB{tail}"


def plot(found: list[Row], path: Path) -> None:
    """Draw one group of bars for each network and batch, then the timelines, in one SVG."""
    bars = sorted((row for row in found if "ms" in row and row["part"] in BARS), key=_experiment)
    drawn, y = [text(TIME_X, 20, "ms per step"), text(MEMORY_X, 20, "GiB on each GPU, with recordings")], 40
    for (net, shape), same in groupby(bars, _experiment):
        lines, y = _group(f"{net}, batch of {' x '.join(map(str, shape))}", list(same), y)
        drawn += lines
    for row in (row for row in found if row.get("timeline")):
        label = f"when each GPU computes in one step of {row['net']}, {row['launch']}, split {row['split']}"
        drawn.append(text(10, y + 5, f"{label} ({row['ms']:.0f} ms)"))
        y += 12
        for gpu, busy in enumerate(row["timeline"]):
            drawn.append(text(10, y + 10, f"GPU {gpu}"))
            drawn += [rectangle(60 + 4 * i, y, 4, 11, COLOURS["ours"], share) for i, share in enumerate(busy) if share]
            y += STEP
        y += 20
    most = max(len(row["peak_gib"]) for row in bars)
    write(path, drawn, max(MEMORY_X + (MEMORY_WIDTH + 45) * most, 880), y)


def _experiment(row: Row) -> tuple[str, list[int]]:
    return row["net"], row["shape"]


def _group(title: str, same: list[Row], y: float) -> tuple[list[str], float]:
    """Draw rows that did the same work, to one scale; return the shapes and where the next group begins."""
    times, fullest = [row["ms"] for row in same], max(max(row["peak_gib"]) for row in same)
    # One peer that takes forty times as long must not hide the others.
    longest = min(max(times), 10 * min(times))
    drawn = [text(10, y + 10, title)]
    y += 18
    for row in same:
        colour = COLOURS.get(row["kind"], OTHERS)
        how = "" if row["split"] is None else f", split {row['split']}"
        drawn.append(text(20, y + 10, f"{row['kind']} {row.get('launch', '')} {row['gpus']} GPU{how}"))
        width = TIME_WIDTH * min(1, row["ms"] / longest)
        drawn += [
            rectangle(TIME_X, y, width, 11, colour),
            text(TIME_X + 5 + width, y + 10, f"{'... ' * (row['ms'] > longest)}{row['ms']:.1f}"),
        ]
        for gpu, gib in enumerate(row["peak_gib"]):
            x, width = MEMORY_X + (MEMORY_WIDTH + 45) * gpu, MEMORY_WIDTH * gib / fullest
            drawn += [rectangle(x, y, width, 11, colour), text(x + width + 3, y + 10, f"{gib:.2f}")]
        y += STEP
    return drawn, y + 14


def main() -> None:
    """Run, or be a worker of such a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="use so many")
    parser.add_argument("--limit-s", type=float, default=570, help="stop after so many seconds; what is done is kept")
    parser.add_argument("--plot", type=Path, help="SVG to draw")
    parser.add_argument("--no-run", action="store_true", help="only draw and print an existing output")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.output)
    if arguments.no_run:
        found = json.loads(arguments.output.read_text(encoding="utf-8"))["rows"]
    else:
        found = supervise(list(rows(arguments.parts, arguments.gpus)), arguments.output, arguments.limit_s)
    print("\n".join(map(describe, found)))
    if arguments.plot:
        plot(found, arguments.plot)
    return None


if __name__ == "__main__":
    main()
