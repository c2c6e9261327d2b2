"""What follows from the rows of ``networks.py``: ours over the compiler's best, two GPUs over one, and a plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svg import rectangle, text, write

__all__ = ["compare", "plot"]

Rows = Mapping[str, Mapping[str, Any]]

COLOURS = {"plain": "#b5b5b5", "compiled": "#d9a441", "ours": "#1b6ca8"}


def compare(networks: Mapping[str, Mapping[str, Rows]]) -> list[dict[str, Any]]:
    """Return a row for each network and size: speeds in Mvoxel/s, the best of each kind, and ratios.

    What is compiled inside of our recorded step counts neither as the compiler's best nor as ours.
    """
    compared = []
    for name, sizes in networks.items():
        for sides, rows in sizes.items():
            speeds = {row: told["mvoxel_per_s"] for row, told in rows.items() if "mvoxel_per_s" in told}
            found: dict[str, Any] = {"network": name, "sides": sides}
            best = {kind: _find_best(speeds, kind) for kind in ("plain", "compiled")}
            for kind, row in best.items():
                if row is not None:
                    found |= {kind: speeds[row], f"{kind} by": row}
            found["ours"] = max((speeds[row] for row in ("ours", "ours, recorded") if row in speeds), default=None)
            if found["ours"] is not None:
                found |= {
                    f"ours / {kind}": found["ours"] / speeds[row] for kind, row in best.items() if row is not None
                }
            if (recorded := _find_best(speeds, "recorded, compiled")) is not None:
                found |= {"recorded, compiled": speeds[recorded], "recorded, compiled by": recorded}
            for gpus, by_itself, times in ((2, "each GPU", "twice"), (4, "each of 4 GPUs", "four times")):
                alone, together = speeds.get(f"ours on {by_itself} alone"), speeds.get(f"ours on {gpus} GPUs")
                if alone and together:
                    found |= {f"ours on {gpus} GPUs": together, f"of {times} one GPU": together / alone}
            found["failed"] = sorted(row for row, told in rows.items() if "error" in told)
            compared.append(found)
    return compared


def _find_best(speeds: Mapping[str, float], kind: str) -> str | None:
    return max((row for row in speeds if row.startswith(kind)), key=speeds.__getitem__, default=None)


def plot(compared: list[dict[str, Any]], path: Path) -> None:
    """Draw the speeds of each network as bars; beside them ours over the compiler's best."""
    rows = [found for found in compared if any(found.get(kind) for kind in COLOURS)]
    most = max((found.get(kind) or 0 for found in rows for kind in COLOURS), default=1.0)
    left, width, top, height = 220.0, 420.0, 40.0, 46.0
    drawn = [text(10, 20, "forward, loss, backward, SGD; bfloat16, one volume: Mvoxel/s")]
    for number, (kind, colour) in enumerate(COLOURS.items()):
        drawn += [rectangle(left + 120 * number, 26, 10, 8, colour), text(left + 120 * number + 14, 34, kind)]
    for place, found in enumerate(rows):
        y = top + height * place
        drawn += [text(10, y + 16, found["network"]), text(10, y + 30, found["sides"])]
        for number, (kind, colour) in enumerate(COLOURS.items()):
            speed, line = found.get(kind), y + 4 + 12 * number
            if speed:
                drawn.append(rectangle(left, line, width * speed / most, 10, colour))
                drawn.append(text(left + width * speed / most + 4, line + 9, f"{speed:.1f}"))
        if "ours / compiled" in found:
            drawn.append(text(left + width + 60, y + 30, f"{found['ours / compiled']:.2f} x compiled"))
    write(path, drawn, left + width + 170, top + height * len(rows) + 20)
