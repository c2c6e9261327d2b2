"""Draw the results of ``pipeline.py``: time per step and memory per GPU as bars, and each GPU's timeline."""

from pathlib import Path
from typing import Any

Row = dict[str, Any]

COLOURS = {"ours": "#1b6ca8", "plain": "#777", "eisen": "#c0392b"}


def rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    """Return a rectangle of an SVG."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}" opacity="{opacity}"/>'


def plot(found: list[Row], path: Path) -> None:
    """Draw time per step and memory per GPU as bars, and the timelines, in one SVG."""
    bars = [
        row for row in found if "ms" in row and row["part"] in ("vnet", "peers", "blocks", "whole", "resnet", "swin")
    ]
    slowest, fullest = max(row["ms"] for row in bars), max(max(row["peak_gib"]) for row in bars)
    drawn, y = ['<text x="10" y="20">ms per step</text><text x="900" y="20">GiB on each GPU</text>'], 40
    for row in bars:
        colour, width = COLOURS.get(row["kind"], "#d9a441"), 500 * row["ms"] / slowest
        label = f"{row['net']}, {row['kind']} {row.get('launch', '')} {row['gpus']} GPU, split {row['split']}"
        drawn.append(f'<text x="10" y="{y + 10}">{label}</text>')
        drawn.append(rectangle(330, y, width, 11, colour))
        drawn.append(f'<text x="{335 + width:.1f}" y="{y + 10}">{row["ms"]:.1f}</text>')
        for gpu, gib in enumerate(row["peak_gib"]):
            height = 11 * gib / fullest
            drawn.append(rectangle(900 + 14 * gpu, y + 11 - height, 12, height, colour))
        y += 15
    for row in (row for row in found if row.get("timeline")):
        y += 30
        label = f"one step of {row['net']}, {row['launch']}: when each GPU computes"
        drawn.append(f'<text x="10" y="{y - 5}">{label}</text>')
        for busy in row["timeline"]:
            drawn += [rectangle(330 + 3 * i, y, 3, 11, "#1b6ca8", share) for i, share in enumerate(busy)]
            y += 14
    size = f'width="1040" height="{y + 20}" font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{"".join(drawn)}</svg>')
