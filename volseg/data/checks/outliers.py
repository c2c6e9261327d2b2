"""Find cases whose statistics are far from those of the other cases: one table of rules, one comparison.

A value is an outlier if it is beyond Tukey's outer fences [1]_, three quartile ranges from the quartiles, and differs
from the median by an amount that matters for its statistic. If more than a tenth of the cases are outliers, the data
set is mixed, and none is reported.

References
----------
.. [1] Tukey, Exploratory Data Analysis (1977), chapter 2: outer fences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from volseg.data.cases import Case, Task
from volseg.data.checks.borders import Texture
from volseg.data.checks.facts import AXES, ComparedCase
from volseg.data.checks.kinds import Finding

__all__ = ["FEWEST_CASES", "RARE", "find_outliers", "report_odd_images", "report_odd_labels"]

FEWEST_CASES = 10
"""Cases that a statistic needs before one of them can be an outlier."""

FENCE = 3.0
"""Quartile ranges from the quartiles."""

RARE = 0.1
"""Largest share of the cases that can be outliers."""

Tail = Literal["low", "high", "both"]


def find_outliers(
    values: Sequence[float], margin: float, tail: Tail = "both", *, is_ratio: bool = False, fewest: int = FEWEST_CASES
) -> list[int]:
    """Return the indices of the outliers.

    Parameters
    ----------
    margin : float
        Smallest distance of an outlier from the median; a factor if ``is_ratio``.
    tail : {"low", "high", "both"}
        Side of the outliers.
    is_ratio : bool
        Compare the logarithms of positive values.
    fewest : int
        Number of values below which none is an outlier.
    """
    if len(values) < fewest:
        return []
    compared = np.asarray(values, dtype=np.float64)
    if is_ratio:
        compared, margin = np.log(np.maximum(compared, np.finfo(np.float64).tiny)), np.log(margin)
    lower, median, upper = np.percentile(compared, [25, 50, 75])
    reach = FENCE * (upper - lower)
    is_low = (compared < lower - reach) & (compared < median - margin)
    is_high = (compared > upper + reach) & (compared > median + margin)
    outliers: list[int] = {"low": is_low, "high": is_high, "both": is_low | is_high}[tail].nonzero()[0].tolist()
    return outliers if len(outliers) <= max(1, RARE * len(values)) else []


@dataclass(frozen=True, slots=True)
class OutlierRule:
    """A statistic of a label or a channel, and the rule for its outliers; see `find_outliers`."""

    kind: str
    tail: Tail
    margin: float
    statistic: Callable[[Any], float]
    """Function of a `LabelShape` or a `Texture`."""
    message: str
    """Template with ``{value}`` and ``{median}``."""
    is_ratio: bool = False


def _smoothness(axis: int) -> Callable[[Texture], float]:
    return lambda texture: texture.smoothness[axis]


VOLUME = "{value:.3g} mm3, elsewhere about {median:.3g}"

LABEL_RULES = (
    OutlierRule("label-volume", "low", 4, attrgetter("volume"), VOLUME, is_ratio=True),
    OutlierRule("label-volume", "high", 6, attrgetter("volume"), VOLUME, is_ratio=True),
    OutlierRule(
        "label-full",
        "low",
        10,
        lambda label: label.unlabelled,
        "{value:.0%} of the voxels are background, elsewhere about {median:.0%}",
        is_ratio=True,
    ),
    OutlierRule(
        "label-ragged",
        "low",
        0.12,
        lambda label: label.agreement,
        "{value:.0%} of neighbours agree, elsewhere {median:.0%}",
    ),
    OutlierRule(
        "label-scattered",
        "high",
        0.3,
        lambda label: label.stray,
        "a voxel {value:.2g} radii from the largest part, elsewhere {median:.2g}",
    ),
    OutlierRule(
        "label-cut", "high", 0.03, lambda label: label.on_faces, "{value:.0%} of its surface, elsewhere {median:.0%}"
    ),
)

TEXTURE_RULES = (
    *(
        OutlierRule(
            "noise",
            "low",
            0.15,
            _smoothness(axis),
            f"neighbours {name} correlate by {{value:.2f}}, elsewhere by {{median:.2f}}",
        )
        for axis, name in enumerate(AXES)
    ),
    *(
        OutlierRule(
            "slices-unlike",
            "high",
            1.5,
            partial(Texture.compare_axis, axis=axis),
            f"{name} {{value:.2f}} times as rough as along the other axes, elsewhere {{median:.2f}}",
            is_ratio=True,
        )
        for axis, name in enumerate(AXES)
    ),
    OutlierRule(
        "wrapped",
        "high",
        0.005,
        lambda texture: texture.jumps,
        "{value:.2%} of neighbours differ by more than 90 % of the range, elsewhere {median:.2%}",
    ),
    OutlierRule(
        "saturated",
        "high",
        0.01,
        lambda texture: texture.share_highest,
        "{value:.1%} of the voxels at the highest value, elsewhere {median:.1%}",
    ),
    OutlierRule(
        "empty-slices",
        "high",
        0.1,
        lambda texture: texture.empty_slices,
        "{value:.0%} of the slices, elsewhere {median:.0%}",
    ),
)


def report_odd_labels(facts: Sequence[ComparedCase]) -> Iterator[Finding]:
    """Remark on labels whose size, shape or place in the volume is unlike that of the other cases."""
    labels = [(fact.case, fact.label) for fact in facts if fact.label is not None]
    for rule in LABEL_RULES:
        yield from _apply(rule, labels, "label")


def report_odd_images(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on images whose voxels are unlike those of the other cases."""
    for index, modality in enumerate(task.modalities):
        where = f"{modality}, " if task.num_channels > 1 else ""
        textures = [
            (fact.case, fact.image.channels[index].texture)
            for fact in facts
            if fact.image is not None and len(fact.image.channels) == task.num_channels
        ]
        for rule in TEXTURE_RULES:
            yield from _apply(rule, textures, "image", where)


def _apply(rule: OutlierRule, measured: Sequence[tuple[Case, Any]], field: str, where: str = "") -> Iterator[Finding]:
    values = [rule.statistic(of) for _, of in measured]
    for index in find_outliers(values, rule.margin, rule.tail, is_ratio=rule.is_ratio):
        message = where + rule.message.format(value=values[index], median=float(np.median(values)))
        yield Finding.of(measured[index][0], rule.kind, message, field)
