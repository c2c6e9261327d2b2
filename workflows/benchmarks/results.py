"""Write a benchmark's result as JSON, with its command, machine and libraries, and draw its plot as SVG."""

import argparse
import gzip
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from volseg.files import replacing

ENVIRONMENT = "import json; from volseg.monitoring.environment import environment; print(json.dumps(environment()))"


def name_command() -> str:
    """Return the command line of this call."""
    return shlex.join(["python", *sys.argv])


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of a script's command line, whose help is the script's own text."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


@cache
def read_environment() -> dict[str, Any]:
    """Return versions and devices, read by another process: torch takes memory of a GPU that it is asked about."""
    asked = subprocess.run([sys.executable, "-c", ENVIRONMENT], stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return dict(json.loads(asked.stdout))


def read_result(path: Path) -> dict[str, Any]:
    """Return the result of an earlier call; an empty one if there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_result(path: Path, indent: int | None = 1, **content: Any) -> None:
    """Write a result as JSON, whole or not at all: a script writes after each row, and may be killed meanwhile."""
    told = {"command": name_command(), "environment": read_environment(), **content}
    text = (json.dumps(told, indent=indent) + "\n").encode()
    with replacing(path) as fresh:
        fresh.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of a chart: a line that ends in a dot, or dots."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    is_line: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a chart."""

    label: str
    size: float
    colour: str
    told: str
    """Words behind the bar."""


WIDTH, HEIGHT, LEFT, TOP, ROW = 640, 380, 60, 30, 16
GREY = "#ccc"


def rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    """Return a filled rectangle."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}" opacity="{opacity}"/>'


def text(x: float, y: float, words: str) -> str:
    """Return words that begin at ``x``, their baseline at ``y``."""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def draw_bars(groups: Mapping[str, Sequence[Bar]]) -> list[str]:
    """Return each group below its title and to its own scale; a row of shapes is `ROW` high, and so is a title."""
    drawn: list[str] = []
    place = 1
    for title, bars in groups.items():
        # One that takes forty times as long must not hide the others.
        longest = min(max(bar.size for bar in bars), 10 * min(bar.size for bar in bars))
        drawn.append(text(10, ROW * (place := place + 1), title))
        for bar in bars:
            y, width = ROW * (place := place + 1), WIDTH / 2 * min(1, bar.size / longest)
            drawn += [text(20, y, bar.label), rectangle(220, y - 9, width, 10, bar.colour)]
            drawn.append(text(224 + width, y, f"{'... ' * (bar.size > longest)}{bar.told}"))
        place += 1
    return drawn


def plot_series(path: Path, title: str, series: Sequence[Series], corner: tuple[float, float], low: float = 0) -> None:
    """Draw points up to a corner, from the lowest height on; what is below lies on the border."""

    def place(point: tuple[float, float]) -> tuple[float, float]:
        height = (max(point[1], low) - low) / (corner[1] - low)
        return LEFT + WIDTH * point[0] / corner[0], TOP + HEIGHT * (1 - height)

    drawn = [text(10, TOP - 12, title)]
    for tick in range(5):
        point = corner[0] * tick / 4, low + (corner[1] - low) * tick / 4
        x, y = place(point)
        drawn += [text(10, y + 4, f"{point[1]:.3g}"), rectangle(LEFT, y, WIDTH, 1, GREY)]
        drawn.append(text(x - 10, TOP + HEIGHT + 18, f"{point[0]:.3g}"))
    for number, one in enumerate(series):
        places = [place(point) for point in one.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn += [f'<polyline points="{joined}" fill="none" stroke="{one.colour}"/>'] if one.is_line else []
        dots = places[-1:] if one.is_line else places
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{one.colour}"/>' for x, y in dots]
        y = TOP + HEIGHT + 40 + ROW * number
        drawn += [rectangle(LEFT, y - 9, 11, 11, one.colour), text(LEFT + 18, y, one.name)]
    write(path, drawn, LEFT + WIDTH + 40, TOP + HEIGHT + 50 + ROW * len(series))


def write(path: Path, drawn: Iterable[str], width: float, height: float) -> None:
    """Write the shapes on a white ground."""
    size = f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{"".join(drawn)}</svg>'
    path.write_text(svg + "\n", encoding="utf-8")
