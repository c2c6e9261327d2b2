"""Labels that do not lie on their image: shifted, mirrored, or exchanged between two cases.

A model of the border (`volseg.data.checks.borders`) is fitted to all cases: the median profile, and the covariance of
its residuals, shrunk towards a multiple of the identity. A case is judged by the robust deviation of its Mahalanobis
distance, and by that of its label's place in the volume. What is reported is not a large deviation, which an unusual
patient has too, but another place of the label, or another case's label, that deviates much less.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from volseg.data.cases import Case
from volseg.data.checks.borders import CELLS, MOVES, LabelShape, Move, describe_border, take_profile
from volseg.data.checks.kinds import Finding
from volseg.data.readers import list_files

__all__ = ["BorderModel", "Placed", "find_exchanged", "find_misplaced"]

FEWEST_PLACED = 20
"""Cases of which a model of the border is made."""

FEWEST_CELLS = CELLS // 2
"""Cells that two profiles need in common."""

SHRINKAGE = 0.3
"""Part of the mean variance that is added to each cell's, more in few cases; 0.1 to 1 give the same on Task04."""

TRIMMED = 0.1
"""Share of the cases, those least like the median profile, that the covariance is computed without."""

MOST_DEVIATION = 8.0
"""Beyond which deviations count as this one, so that no single number decides."""

BETTER = 6.5
"""By how much half the squared deviations must fall for a moved label. Of Task04's 208 cases the largest is 4.6."""

MOSTLY, LEAST_COST = 0.8, 0.5
"""Share of the cases for which half the squared deviations must rise by so much when labels are moved; else labels lie
anywhere, as lesions do, or are symmetric, and their place says nothing. In Task04 four of five rise by 0.95."""

SPREADS = 1.4
"""A label is not shifted by less than this many robust deviations of the places of labels."""

SUSPICIOUS, MOST_SUSPICIOUS = 1.5, 32
"""Deviation from which a label is tried on other images, and how many of them are read again."""

BETTER_EXCHANGED, USUAL = 3.0, 2.5
"""By how much two deviations together must fall when labels are exchanged, and below what both must lie then."""

TOLERANCES = (0.05, 0.5, 0.015)
"""Added to the robust deviations: of the logarithms of distances, of places (coarse voxels), and of skews."""

DIRECTIONS = (("right", "left"), ("front", "back"), ("head", "feet"))
AXES = ("left-right", "front-back", "head-feet")


@dataclass(frozen=True, slots=True)
class Placed:
    """A case with its label's shape."""

    case: Case
    label: LabelShape


class BorderModel:
    """What borders and places of labels are like in a data set.

    Parameters
    ----------
    cases : sequence of LabelShape
        With profiles, and without other findings.
    """

    def __init__(self, cases: Sequence[LabelShape]) -> None:
        profiles = _standardise(np.array([case.profiles[0] for case in cases], dtype=np.float64))
        self._is_used = np.isfinite(profiles).mean(0) > 0.5
        profiles[:, ~self._is_used] = np.nan
        self._usual = np.nanmedian(profiles[:, self._is_used], axis=0)
        residuals = np.nan_to_num(profiles[:, self._is_used] - self._usual)
        likely = np.argsort(np.square(residuals).sum(1))[: max(1, round((1 - TRIMMED) * len(cases)))]
        covariance = residuals[likely].T @ residuals[likely] / len(likely)
        size = len(covariance)
        covariance += (max(SHRINKAGE, CELLS / len(cases)) * np.trace(covariance) / size + 1e-9) * np.eye(size)
        self._root = np.linalg.cholesky(np.linalg.inv(covariance))
        distances = self._measure(np.array([case.profiles[0] for case in cases]))
        self._middle, self._width = _fit(distances, TOLERANCES[0])
        self._offsets = _fit(np.array([case.offset for case in cases]), TOLERANCES[1])
        self._skews = _fit(np.array([case.skew for case in cases]), TOLERANCES[2])

    @property
    def spread(self) -> np.ndarray:
        """Robust standard deviations of the places of labels, along right-left, front-back and head-feet."""
        return self._offsets[1]

    @classmethod
    def of(cls, cases: Sequence[LabelShape]) -> "BorderModel | None":
        """Return the model of a data set; None where there are too few cases, or profiles with too many gaps."""
        known = np.array([np.isfinite(case.profiles[0]) for case in cases])
        return cls(cases) if len(cases) >= FEWEST_PLACED and (known.mean(0) > 0.5).sum() >= FEWEST_CELLS else None

    def _measure(self, profiles: np.ndarray) -> np.ndarray:
        """Return logarithms of squared distances from the usual profile; NaN of a profile with too many gaps."""
        residuals = _standardise(profiles.astype(np.float64))[..., self._is_used] - self._usual
        is_known = np.isfinite(residuals)
        residuals = np.where(is_known, residuals, 0)
        distances = np.log(np.square(residuals @ self._root).sum(-1) + 1e-12)
        measured: np.ndarray = np.where(is_known.sum(-1) >= FEWEST_CELLS, distances, np.nan)
        return measured

    def _deviate(self, distances: np.ndarray) -> np.ndarray:
        return np.nan_to_num((distances - self._middle) / self._width, nan=MOST_DEVIATION)

    def deviate(self, profiles: np.ndarray) -> np.ndarray:
        """Return by how many robust standard deviations profiles are less usual than the median case's."""
        return self._deviate(self._measure(profiles))

    def rate(self, label: LabelShape) -> np.ndarray:
        """Return half of the squared deviations of a label after each of `MOVES`: of its border, and of its place."""
        offsets, skews = (np.tile(place, (len(MOVES), 1)) for place in (label.offset, label.skew))
        for row, move in enumerate(MOVES):
            offsets[row, move.axis] += move.step
            if move.kind == "mirror":
                offsets[row, move.axis] *= -1
                skews[row, move.axis] *= -1
        places = [(of - middle) / width for of, (middle, width) in ((offsets, self._offsets), (skews, self._skews))]
        deviations = np.concatenate([self.deviate(label.profiles).clip(0)[:, None], *places], axis=1)
        rated: np.ndarray = np.square(np.minimum(np.abs(deviations), MOST_DEVIATION)).sum(1) / 2
        return rated


def _standardise(profiles: np.ndarray) -> np.ndarray:
    is_known = np.isfinite(profiles)
    count = np.maximum(is_known.sum(-1, keepdims=True), 1)
    centred = profiles - np.where(is_known, profiles, 0).sum(-1, keepdims=True) / count
    spread = np.sqrt(np.square(np.where(is_known, centred, 0)).sum(-1, keepdims=True) / count)
    return centred / np.maximum(spread, 1e-12)


def _fit(values: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return medians along the first axis, and robust standard deviations, a little widened."""
    middle = np.nanmedian(values, axis=0)
    return middle, 1.4826 * np.nanmedian(np.abs(values - middle), axis=0) + tolerance


def find_misplaced(cases: Sequence[Placed], model: BorderModel, most: int) -> Iterator[Finding]:
    """Remark on labels that would lie much better elsewhere in their volume; on none if more than ``most`` would."""
    rates = np.array([model.rate(placed.label) for placed in cases])
    costs = rates[:, 1:] - rates[:, :1]
    is_shift = np.array([move.kind == "shift" for move in MOVES[1:]])
    if np.quantile(costs[:, is_shift].min(1), 1 - MOSTLY) < LEAST_COST:
        return
    costs[:, np.quantile(costs, 1 - MOSTLY, axis=0) < LEAST_COST] = np.inf
    for column, move in enumerate(MOVES[1:]):
        if move.kind == "shift" and abs(move.step) < model.spread[move.axis] * SPREADS:
            costs[:, column] = np.inf
    better = (costs.min(1) < -BETTER).nonzero()[0]
    for place in better if len(better) <= most else ():
        placed, move = cases[place], MOVES[1 + int(costs[place].argmin())]
        kind = "label-mirrored" if move.kind == "mirror" else "label-shifted"
        yield Finding(placed.case["case"], list_files(placed.case["label"])[0], _describe(move, placed.label), kind)


def _describe(move: Move, label: LabelShape) -> str:
    if move.kind == "mirror":
        return f"fits much better when mirrored {AXES[move.axis]}"
    towards = DIRECTIONS[move.axis][0 if move.step > 0 else 1]
    return f"fits much better about {abs(move.step) * label.steps[move.axis]} voxels further {towards}"


def find_exchanged(
    cases: Sequence[Placed], model: BorderModel, read: Callable[[Case], tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> Iterator[Finding]:
    """Remark on pairs of cases in which each one's label fits the other's image much better than its own.

    Parameters
    ----------
    cases : sequence of Placed
        With their labels.
    model : BorderModel
        Of the data set.
    read : callable
        Returns a case's image and labelled voxels, both coarse, and the sides of its coarse voxels (mm).
    """
    deviations = model.deviate(np.array([placed.label.profiles[0] for placed in cases])).clip(0)
    order = np.argsort(-deviations)[:MOST_SUSPICIOUS]
    suspects = [int(place) for place in order if deviations[place] > SUSPICIOUS]
    volumes = {place: read(cases[place].case) for place in suspects} if len(suspects) > 1 else {}
    gains = {}
    pairs = [pair for pair in combinations(volumes, 2) if volumes[pair[0]][0].shape == volumes[pair[1]][0].shape]
    for one, other in pairs:
        now = [float(deviations[place]) for place in (one, other)]
        then = [
            max(0.0, float(model.deviate(_profile_on(volumes[image][0], *volumes[label][1:]))))
            for image, label in ((one, other), (other, one))
        ]
        if max(then) < USUAL and all(after < before for after, before in zip(then, now, strict=True)):
            gains[one, other] = sum(now) - sum(then)
    told: set[int] = set()
    for (one, other), gain in sorted(gains.items(), key=lambda item: -item[1]):
        if gain > BETTER_EXCHANGED and not told & {one, other}:
            told |= {one, other}
            for place, partner in ((one, other), (other, one)):
                case, name = cases[place].case, cases[partner].case["case"]
                yield Finding(case["case"], list_files(case["label"])[0], f"with {name}", "labels-exchanged")


def _profile_on(image: np.ndarray, labelled: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return the profile of a label on an image of the same shape."""
    border = describe_border(labelled, sides)
    return np.full(CELLS, np.nan) if border is None else take_profile(image, border)
