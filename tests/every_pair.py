"""Several things that a test is run with: every pair of their values by default, all combinations in ``make test-all``.

What goes wrong with a value, or where two meet, is found by combinations in which every two values meet once; faults
for which three must meet are rare. Of three by three by two combinations nine hold all pairs.
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Any], ids: Sequence[Sequence[str]] | None = None) -> list[Any]:
    """Return all combinations of the axes' values as parameters of one test; the ones not needed for pairs are slow.

    Parameters
    ----------
    *axes
        The values of each argument.
    ids
        Their names by axis, where ``str`` does not do.
    """
    names = ids or [[str(value) for value in axis] for axis in axes]
    chosen = set(select_pairs([len(axis) for axis in axes]))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, row, strict=True)),
            id="-".join(named[index] for named, index in zip(names, row, strict=True)),
            marks=() if row in chosen else pytest.mark.slow,
        )
        for row in product(*(range(len(axis)) for axis in axes))
    ]


def select_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows of indices in which every two indices of two axes meet: each time the row that adds most."""
    rows = list(product(*map(range, sizes)))
    if len(sizes) < 2:
        return rows
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(row: Sequence[int]) -> set[Any]:
    return set(combinations(enumerate(row), 2))
