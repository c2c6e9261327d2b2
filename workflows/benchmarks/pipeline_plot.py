"""Draw the results of ``pipeline.py``: time per step and memory per GPU as bars, and each GPU's timeline."""

from pathlib import Path
from typing import Any

from svg import rectangle, text, write

Row = dict[str, Any]

COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}


def plot(found: list[Row], path: Path) -> None:
    """Draw time per step and memory per GPU as bars, and the timelines, in one SVG."""
    bars = [
        row for row in found if "ms" in row and row["part"] in ("vnet", "peers", "blocks", "whole", "resnet", "swin")
    ]
    slowest, fullest = max(row["ms"] for row in bars), max(max(row["peak_gib"]) for row in bars)
    drawn, y = [text(10, 20, "ms per step"), text(900, 20, "GiB on each GPU")], 40
    for row in bars:
        colour, width = COLOURS.get(row["kind"], "#d9a441"), 500 * row["ms"] / slowest
        label = f"{row['net']}, {row['kind']} {row.get('launch', '')} {row['gpus']} GPU, split {row['split']}"
        drawn.append(text(10, y + 10, label))
        drawn.append(rectangle(330, y, width, 11, colour))
        drawn.append(text(335 + width, y + 10, f"{row['ms']:.1f}"))
        for gpu, gib in enumerate(row["peak_gib"]):
            height = 11 * gib / fullest
            drawn.append(rectangle(900 + 14 * gpu, y + 11 - height, 12, height, colour))
        y += 15
    for row in (row for row in found if row.get("timeline")):
        y += 30
        label = f"one step of {row['net']}, {row['launch']}: when each GPU computes"
        drawn.append(text(10, y - 5, label))
        for busy in row["timeline"]:
            drawn += [rectangle(330 + 3 * i, y, 3, 11, "#1b6ca8", share) for i, share in enumerate(busy)]
            y += 14
    write(path, drawn, 1040, y + 20)
