"""One's own Dice beside that of others."""

from collections.abc import Mapping, Sequence
from typing import Any

from volseg.reporting.content import TextTable
from volseg.reporting.reading import mean
from volseg.reporting.words import format_value

__all__ = ["tabulate_published"]


def tabulate_published(
    published: Sequence[Mapping[str, Any]], names: Sequence[str], own: tuple[str, str, int, Sequence[float], float]
) -> TextTable:
    """Return a table of published results below one's own.

    Parameters
    ----------
    published : sequence of mapping
        Of `volseg.evaluation.published.PublishedResult`.
    names : sequence of str
        Of the labels.
    own : tuple
        Method, evaluation, number of cases, Dice of each label, and their mean.
    """
    method, evaluation, cases, dice, overall = own
    first = [method, evaluation, str(cases), *(format_value(value, "Dice") for value in (*dice, overall)), ""]
    rows = [
        [
            str(row["method"]),
            str(row["evaluation"]),
            str(row["num_cases"]),
            *_format_dice([float(value) for _, value in sorted(row["dice"].items(), key=lambda item: int(item[0]))]),
            str(row["source"]),
        ]
        for row in published
    ]
    header = ("method", "evaluation", "cases", *names, "mean", "source")
    return TextTable(caption="Dice beside published results", header=header, rows=[first, *rows], bold=frozenset([0]))


def _format_dice(dice: Sequence[float]) -> list[str]:
    """Return as many digits as the source has, and one more for a mean of its numbers."""
    digits = max(2, *(len(repr(value).partition(".")[2]) for value in dice))
    return [*(f"{value:.{digits}f}" for value in dice), f"{mean(dice):.{min(digits + 1, 4)}f}"]
