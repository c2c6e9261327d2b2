"""Draw Dice over seconds as an SVG: a curve per training, a dot where it ended, a legend below."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from svg import circle, line, rectangle, text, write

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

    drawn = [text(10, TOP - 12, "mean Dice over seconds since the start of the process")]
    for tick in range(5):
        dice, seconds = lowest + (highest - lowest) * tick / 4, longest * tick / 4
        x, y = place((seconds, dice))
        drawn += [text(10, y + 4, f"{dice:.3f}"), rectangle(LEFT, y, WIDTH, 1, GRID)]
        drawn.append(text(x - 10, TOP + HEIGHT + 18, f"{seconds:.0f} s"))
    for row, curve in enumerate(curves):
        places = [place(point) for point in (*curve.points, curve.end)]
        drawn += [line(places, curve.colour), circle(places[-1], curve.colour)]
        y = TOP + HEIGHT + 40 + 16 * row
        drawn.append(rectangle(LEFT, y - 9, 11, 11, curve.colour))
        drawn.append(text(LEFT + 18, y, f"{curve.title}: {curve.end[1]:.4f} after {curve.end[0]:.0f} s"))
    write(path, drawn, LEFT + WIDTH + 40, TOP + HEIGHT + 50 + 16 * len(curves))
