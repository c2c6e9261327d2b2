"""Draw Dice over seconds as an SVG: a curve per training, a dot where it ended, a legend below."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipeline_plot import rectangle

__all__ = ["Curve", "draw"]

WIDTH, HEIGHT, LEFT, TOP = 760, 380, 60, 30
GRID = "#ddd"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training."""

    title: str
    colour: str
    points: Sequence[tuple[float, float]]
    """Seconds since the start of the process, and Dice."""
    end: tuple[float, float]
    """When everything was done, and the Dice of the final predictions."""


def draw(curves: Sequence[Curve], path: Path, *, lowest: float = 0.7) -> None:
    """Draw the curves; Dice below ``lowest`` lies on the lower border."""
    longest = max(curve.end[0] for curve in curves) or 1.0
    highest = max(0.9, *(dice for curve in curves for _, dice in (*curve.points, curve.end)))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        seconds, dice = point
        height = (max(dice, lowest) - lowest) / (highest - lowest)
        return LEFT + WIDTH * seconds / longest, TOP + HEIGHT * (1 - height)

    drawn = [f'<text x="10" y="{TOP - 12}">mean Dice over seconds since the start of the process</text>']
    for tick in range(5):
        dice, seconds = lowest + (highest - lowest) * tick / 4, longest * tick / 4
        x, y = place((seconds, dice))
        drawn.append(f'<text x="10" y="{y + 4:.1f}">{dice:.3f}</text>')
        drawn.append(rectangle(LEFT, y, WIDTH, 1, GRID))
        drawn.append(f'<text x="{x - 10:.1f}" y="{TOP + HEIGHT + 18}">{seconds:.0f} s</text>')
    for row, curve in enumerate(curves):
        places = [place(point) for point in (*curve.points, curve.end)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="1.5"/>')
        drawn.append(f'<circle cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="3.5" fill="{curve.colour}"/>')
        y = TOP + HEIGHT + 40 + 16 * row
        drawn.append(rectangle(LEFT, y - 9, 11, 11, curve.colour))
        words = f"{curve.title}: {curve.end[1]:.4f} after {curve.end[0]:.0f} s"
        drawn.append(f'<text x="{LEFT + 18}" y="{y}">{escape(words)}</text>')
    size = f'width="{LEFT + WIDTH + 40}" height="{TOP + HEIGHT + 50 + 16 * len(curves)}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    font = 'font-family="sans-serif" font-size="11"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{ground}{"".join(drawn)}</svg>'
    path.write_text(svg + "\n", encoding="utf-8")
