"""Draw the results of ``pipeline.py``: time per step and memory per GPU as bars, and each GPU's timeline."""

from itertools import groupby
from pathlib import Path
from typing import Any

from svg import rectangle, text, write

Row = dict[str, Any]

COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}
OTHERS = "#d9a441"

BARS, STEP = ("vnet", "peers", "blocks", "whole", "resnet", "swin"), 15
TIME_X, TIME_WIDTH, MEMORY_X, MEMORY_WIDTH = 200, 420, 690, 45


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
