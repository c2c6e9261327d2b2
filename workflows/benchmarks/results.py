"""Write a benchmark's result as JSON, with its command, machine and libraries, and draw its plot as SVG."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from volseg.monitoring.environment import environment


def write_result(path: Path, **content: Any) -> None:
    """Write a result as JSON, whole or not at all: a script writes after each row, and may be killed meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"command": shlex.join(["python", *sys.argv]), "environment": environment(), **content}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def rectangle(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    """Return a filled rectangle."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}" opacity="{opacity}"/>'


def text(x: float, y: float, words: str) -> str:
    """Return words that begin at ``x``, their baseline at ``y``."""
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str) -> str:
    """Return a line through the points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def circle(point: tuple[float, float], colour: str) -> str:
    """Return a dot."""
    return f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3.5" fill="{colour}"/>'


def write(path: Path, drawn: Iterable[str], width: float, height: float) -> None:
    """Write the shapes on a white ground."""
    size = f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}{"".join(drawn)}</svg>'
    path.write_text(svg + "\n", encoding="utf-8")
