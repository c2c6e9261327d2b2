"""Cases whose statistics lie far from those of the others: one table of rules.

A value is odd if it is more than five robust standard deviations (1.4826 times the median absolute deviation) from the
median, and by an absolute amount that matters; in ten cases or more, of which at most a tenth are odd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from volseg.data.cases import Task
from volseg.data.checks.borders import LabelShape
from volseg.data.checks.facts import ComparedCase
from volseg.data.checks.kinds import Finding
from volseg.data.checks.texture import Texture
from volseg.data.readers import list_files

__all__ = ["RARE", "find_absent_labels", "find_odd_images", "find_odd_labels"]

Facts = TypeVar("Facts")

FEWEST_CASES = 10
"""Of which one can be odd."""

ODD = 5.0
"""Robust standard deviations from the median."""

RARE = 0.1
"""Share of the cases that can be odd."""

ALWAYS, FEWEST_ALWAYS = 0.95, 20
"""Share of the cases that hold a value, of so many, from which on a case without it is odd."""

FULL, NOT_FULL = 0.98, 0.9
"""Labelled share of a volume that is full, and below which nine of ten cases must stay for one to be odd."""


@dataclass(frozen=True)  # slots and generics do not go together
class Oddity(Generic[Facts]):
    """A statistic, and how far from the median it is odd."""

    kind: str
    sign: int
    """1 where large values are odd, -1 where small ones are."""
    apart: float
    """How far from the median an odd value lies at least."""
    measure: Callable[[Facts], float]
    says: str
    """With ``value`` and ``usual``."""


AXES = ("left-right", "front-back", "head-feet")

LABEL_RULES: Sequence[Oddity[LabelShape]] = (
    Oddity(
        "label-ragged",
        -1,
        0.12,
        lambda label: label.agreement,
        "{value:.0%} of neighbours agree, elsewhere {usual:.0%}",
    ),
    Oddity(
        "label-scattered",
        1,
        0.3,
        lambda label: label.stray,
        "a voxel {value:.2g} radii from the largest part, elsewhere {usual:.2g}",
    ),
    Oddity(
        "label-cut",
        1,
        0.03,
        lambda label: label.on_faces,
        "{value:.2g} of its surface, elsewhere {usual:.2g}",
    ),
)

TEXTURE_RULES: Sequence[Oddity[Texture]] = (
    *(
        Oddity[Texture](
            "noise",
            -1,
            0.15,
            lambda texture, axis=axis: texture.smoothness[axis],  # type: ignore[misc]
            f"neighbours {name} correlate by {{value:.2f}}, elsewhere by {{usual:.2f}}",
        )
        for axis, name in enumerate(AXES)
    ),
    *(
        Oddity[Texture](
            "slices-unlike",
            1,
            0.4,
            lambda texture, axis=axis: texture.compare_axis(axis),  # type: ignore[misc]
            f"{name} {{value:.2f}} by the logarithm, elsewhere {{usual:.2f}}",
        )
        for axis, name in enumerate(AXES)
    ),
    Oddity(
        "wrapped",
        1,
        0.005,
        lambda texture: texture.jumps,
        "{value:.2%} of neighbours differ by more than 90 % of the range, elsewhere {usual:.2%}",
    ),
    Oddity(
        "saturated",
        1,
        0.01,
        lambda texture: texture.share_highest,
        "{value:.1%} of the voxels at the highest value, elsewhere {usual:.1%}",
    ),
    Oddity("empty-slices", 1, 0.1, lambda texture: texture.empty_slices, "{value:.0%} of them, elsewhere {usual:.0%}"),
)

SMALL, LARGE = 4.0, 6.0
"""Factors from the median at which the labelled volume is odd."""


def find_odd_labels(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on labels whose size, shape or place in the volume is unlike that of the other cases."""
    shown = [fact for fact in facts if fact.label is not None and fact.image is not None]
    for rule in LABEL_RULES:
        values = [rule.measure(fact.label) for fact in shown if fact.label is not None]
        for place, usual in _find_odd(values, rule.sign, rule.apart):
            yield _tell(shown[place], rule.kind, rule.says.format(value=values[place], usual=usual), "label")
    yield from _find_odd_volumes(shown, task)
    yield from _find_full(shown, task)


def find_odd_images(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on images whose voxels are unlike those of the other cases."""
    for index, modality in enumerate(task.modalities):
        where = f"{modality}, " if task.num_channels > 1 else ""
        shown = [
            (fact, fact.image.channels[index].texture)
            for fact in facts
            if fact.image is not None and len(fact.image.channels) == task.num_channels
        ]
        for rule in TEXTURE_RULES:
            values = [rule.measure(texture) for _, texture in shown]
            for place, usual in _find_odd(values, rule.sign, rule.apart):
                detail = where + rule.says.format(value=values[place], usual=usual)
                yield _tell(shown[place][0], rule.kind, detail, "image")


def _find_odd(values: Sequence[float], sign: int, apart: float) -> list[tuple[int, float]]:
    """Return the places of odd values, each with the median."""
    if len(values) < FEWEST_CASES:
        return []
    known = np.array(values)
    usual = float(np.median(known))
    width = 1.4826 * float(np.median(np.abs(known - usual)))
    odd = ((known - usual) * sign > max(ODD * width, apart)).nonzero()[0].tolist()
    return [(place, usual) for place in odd] if len(odd) <= max(1, RARE * len(values)) else []


def _find_odd_volumes(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    sizes = [_count_structures(fact, task) * float(np.prod(fact.image.spacing)) for fact in facts if fact.image]
    for sign, factor in ((-1, SMALL), (1, LARGE)):
        for place, usual in _find_odd(np.log(sizes).tolist(), sign, float(np.log(factor))):
            detail = f"{sizes[place]:.3g} mm3, elsewhere about {np.exp(usual):.3g}"
            yield _tell(facts[place], "label-volume", detail, "label")


def _find_full(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    shares = [_count_structures(fact, task) / max(1, sum(fact.label_counts.values())) for fact in facts]
    full = [place for place, share in enumerate(shares) if share > FULL]
    if len(shares) >= FEWEST_CASES and np.quantile(shares, 1 - RARE) < NOT_FULL:
        for place in full:
            usual = float(np.median(shares))
            yield _tell(facts[place], "label-full", f"{shares[place]:.0%}, elsewhere about {usual:.0%}", "label")


def _count_structures(fact: ComparedCase, task: Task) -> int:
    return sum(count for value, count in fact.label_counts.items() if value not in (0, task.ignore))


def find_absent_labels(facts: Sequence[ComparedCase], task: Task) -> Iterator[Finding]:
    """Remark on cases that lack a label which nearly all others hold; on none whose label is empty, which is told."""
    labelled = [fact for fact in facts if fact.image is not None and _count_structures(fact, task)]
    for value, name in task.foreground.items():
        looked = [fact for fact in labelled if value in (fact.case.get("labelled") or (value,))]
        absent = [fact for fact in looked if value not in fact.label_counts]
        if len(looked) >= FEWEST_ALWAYS and len(absent) <= max(1, (1 - ALWAYS) * len(looked)):
            for fact in absent:
                share = 1 - len(absent) / len(looked)
                yield _tell(fact, "label-absent", f"{value} ({name}), which {share:.0%} of the cases hold", "label")


def _tell(fact: ComparedCase, kind: str, detail: str, field: str) -> Finding:
    return Finding(fact.case["case"], list_files(fact.case[field])[0], detail, kind)
