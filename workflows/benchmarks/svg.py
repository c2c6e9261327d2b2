"""The few shapes of an SVG that the benchmarks' plots are drawn with."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

__all__ = ["circle", "line", "rectangle", "text", "write"]


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
