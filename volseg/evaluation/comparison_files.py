"""A comparison of methods for reading: a table, a CSV, a JSON file and a picture (SVG, which needs no library)."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path

from volseg.evaluation.comparing import Method, PairedResult
from volseg.evaluation.summary import replace_unknown
from volseg.evaluation.tables import format_table, name_cases
from volseg.files import replacing

__all__ = ["comparison_table", "draw_comparison", "write_comparison"]

WIDTH, MARGIN, ROW = 760, 260, 34
"""Of the picture, in its units."""


def comparison_table(results: Sequence[PairedResult]) -> str:
    """Return a Markdown table, a row for each metric, label and pair of methods."""
    rows: list[tuple[str, ...]] = [
        ("metric", "label", "methods", "means", "difference", "95 % interval", "better/worse/equal", "p", "p (Holm)")
    ]
    for of in results:
        undefined = f", {of.num_undefined} undefined" if of.num_undefined else ""
        rows.append(
            (
                of.metric,
                of.label,
                f"{of.second} - {of.first}",
                f"{_format(of.mean_second)} - {_format(of.mean_first)}",
                _format(of.mean_difference, "+"),
                f"{_format(of.low, '+')} to {_format(of.high, '+')}",
                f"{of.num_better}/{of.num_worse}/{of.num_equal} of {of.num_cases}{undefined}",
                f"{of.p_value:.2g}",
                f"{of.p_holm:.2g}",
            )
        )
    return format_table(rows)


def write_comparison(results: Sequence[PairedResult], methods: Sequence[Method], folder: str | Path) -> list[Path]:
    """Write ``comparison.json``, ``comparison.csv`` and ``comparison.svg``, each in one step; return the paths."""
    folder = Path(folder)
    cases = sorted(name_cases(methods[0].summary))
    paths = [folder / f"comparison.{suffix}" for suffix in ("json", "csv", "svg")]
    told = {
        "methods": [method.name for method in methods],
        "cases": cases,
        "test": "Wilcoxon signed-rank, two-sided, cases of no difference left out",
        "correction": "Holm, over the labels and pairs of methods of a metric",
        "results": [replace_unknown(asdict(result)) for result in results],
    }
    with replacing(paths[0]) as partial:
        partial.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    names = [field.name for field in fields(PairedResult) if field.name != "differences"]
    with replacing(paths[1]) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, *cases])
        table.writerows([*(getattr(of, name) for name in names), *of.differences] for of in results)
    with replacing(paths[2]) as partial:
        partial.write_text(draw_comparison(results), encoding="utf-8")
    return paths


def draw_comparison(results: Sequence[PairedResult]) -> str:
    """Return an SVG: a panel for each metric, in it a row for each label and pair, a dot for each case.

    A bar is the interval of the mean difference. Differences that are not finite are not drawn.
    """
    metrics = list(dict.fromkeys(of.metric for of in results))
    panels, top = [], 10
    for metric in metrics:
        rows = [of for of in results if of.metric == metric]
        panels.append(_draw_panel(metric, rows, top))
        top += 60 + ROW * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{top}" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def _draw_panel(metric: str, rows: Sequence[PairedResult], top: int) -> str:
    shown = [value for of in rows for value in (*of.differences, of.low, of.high) if math.isfinite(value)]
    reach = max(map(abs, shown), default=0.0) or 1.0
    bottom = top + 30 + ROW * len(rows)

    def place(value: float) -> float:
        return MARGIN + (WIDTH - MARGIN - 20) * (value / reach + 1) / 2

    lines = [
        f'<text x="10" y="{top + 15}" font-weight="bold">{escape(metric)}: difference by case</text>',
        f'<line x1="{place(0):.1f}" x2="{place(0):.1f}" y1="{top + 22}" y2="{bottom}" stroke="black"/>',
    ]
    lines += [
        f'<text x="{place(value):.1f}" y="{bottom + 15}" text-anchor="middle">{value:.3g}</text>'
        for value in (-reach, 0.0, reach)
    ]
    for number, of in enumerate(rows):
        middle = top + 30 + ROW * number + ROW / 2
        lines.append(f'<text x="10" y="{middle - 2:.1f}">{escape(of.label)}</text>')
        lines.append(f'<text x="10" y="{middle + 11:.1f}" fill="gray">{escape(f"{of.second} - {of.first}")}</text>')
        for rank, value in enumerate(of.differences):
            if math.isfinite(value):
                # Spread up and down by a fixed pattern, so that cases do not lie on each other.
                height = middle + (rank * 7 % 11 - 5) * 1.6
                lines.append(
                    f'<circle cx="{place(value):.1f}" cy="{height:.1f}" r="2.5" fill="#3c96e6" fill-opacity="0.5"/>'
                )
        if math.isfinite(of.low) and math.isfinite(of.high):
            lines.append(
                f'<line x1="{place(of.low):.1f}" x2="{place(of.high):.1f}" y1="{middle}" y2="{middle}" '
                'stroke="#e6503c" stroke-width="3"/>'
            )
            lines.append(f'<circle cx="{place(of.mean_difference):.1f}" cy="{middle}" r="5" fill="#e6503c"/>')
    return "\n".join(lines)


def _format(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if math.isfinite(value) else "-"
