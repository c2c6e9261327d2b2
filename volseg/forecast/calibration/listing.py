"""All cases, in the order in which they are timed."""

import random

from volseg.device import triton_tiles
from volseg.forecast.calibration.cases import RateCase
from volseg.forecast.calibration.convolutions import list_convolutions
from volseg.forecast.calibration.others import list_others
from volseg.forecast.calibration.passes import list_passes

__all__ = ["list_cases"]


def list_cases() -> list[RateCase]:
    """Return all cases in an order of which any beginning covers every kind."""
    cases = [*list_convolutions(), *list_passes(), *list_others()]
    if not triton_tiles.available():
        cases = [case for case in cases if "ours" not in case.name]
    random.Random(0).shuffle(cases)  # noqa: S311  (the same order everywhere: processes share the list)
    return cases
