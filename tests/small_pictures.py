"""Pictures of cases at an eighth of their size; full ones took 40 % of a tiny training.

Every step is taken as before, to files of the same kinds. What one sees is tested where pictures are drawn by
themselves (``monitoring/test_pictures.py``), and a test whose training is to draw as for a user asks for
``true_pictures``.
"""

import sys
from collections.abc import Iterator
from typing import Any

SMALLER = 8

_true: dict[str, int] = {}
"""The sides in pixels that have been changed, by module."""


def shrink_pictures() -> None:
    """Let what a training draws be small from now on."""
    for name, holder, key in _found():
        holder[key] = _true.setdefault(name, holder[key]) // SMALLER


def restore_pictures() -> None:
    """Let it be as large as it is for a user."""
    for name, holder, key in _found():
        holder[key] = _true.get(name, holder[key])


def _found() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield where sides are kept, of the modules that somebody has imported: other tests do not wait for them."""
    if pictures := sys.modules.get("volseg.monitoring.pictures"):
        yield "pictures", pictures.draw_example.__kwdefaults__, "min_side"
    if overlays := sys.modules.get("volseg.experiment.report"):
        yield "overlays", vars(overlays), "MIN_SIDE"
