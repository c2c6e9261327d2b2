"""The old name of ``volseg.parallel.spatial`` and of what was taken out of it. It goes with the next release."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

__all__: list[str] = []

RENAMED = {"CapturedStep": "RecordedStep"}

HOMES = {
    "SpatialStrategy": "volseg.parallel.spatial",
    "CapturedStep": "volseg.parallel",
    "ShardedVolume": "volseg.parallel",
    "from_slab": "volseg.parallel",
    "loads_batches": "volseg.parallel",
    "pointwise_function": "volseg.parallel",
    "scatter_batch": "volseg.parallel",
    "slab_shape": "volseg.parallel",
    "whole": "volseg.parallel",
}
"""Where the names are now that this package had."""


def moved(old: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that finds names where they are now, and warns."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        home, now = homes[name], RENAMED.get(name, name)
        warnings.warn(
            f"{old}.{name} is {home}.{now} now; the old name goes with the next release", FutureWarning, stacklevel=2
        )
        # By name: this package may not import the losses.
        return getattr(importlib.import_module(home), now)

    return find


__getattr__ = moved(__name__, HOMES)
