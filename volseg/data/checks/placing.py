"""Find labels that do not match their image: shifted, mirrored, or exchanged between two cases.

A model of the border (`volseg.data.checks.borders`) is fitted to all cases: the median profile, and the covariance of
its residuals, shrunk towards a multiple of the identity. A case is rated by the robust deviation of its Mahalanobis
distance, and of its label's place in the volume. An unusual patient has a large deviation too, so a label is reported
only if another place, or another case's label, deviates much less.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from volseg.data.cases import Case, Task
from volseg.data.checks.borders import CELLS, MOVES, LabelShape, Move, coarsen, describe_border, pool, take_profile
from volseg.data.checks.facts import AXES, RARE, ComparedCase, anatomical_axes, turn_upright
from volseg.data.checks.kinds import Finding
from volseg.data.readers import read_label, read_volume

FEWEST_PLACED = 20
"""Fewest cases for a model of the border."""

FEWEST_CELLS = CELLS // 2
"""Fewest cells with values in both profiles of a comparison."""

SHRINKAGE = 0.3
"""Share of the mean variance that is added to each cell's, more for few cases; on Task04 0.1 to 1 are equivalent."""

TRIMMED = 0.1
"""Share of the cases that the covariance leaves out: those least similar to the median profile."""

MOST_DEVIATION = 8.0
"""Larger deviations are clipped to this value, so that no single one decides."""

BETTER = 6.5
"""Smallest decrease of half the squared deviations for which a move is reported; the largest in Task04 is 4.6."""

MOSTLY, LEAST_COST = 0.7, 0.5
"""In this share of the sound cases, every shift must raise half the squared deviations by this amount. Otherwise the
places of labels carry no information, and no move is reported. A mirroring that costs less is not reported: the anatomy
is symmetric."""

SPREADS = 1.4
"""Smallest reported shift, in robust deviations of the places of labels: lesions may be anywhere."""

SUSPICIOUS, MOST_SUSPICIOUS = 1.5, 32
"""Deviation above which a label is tried on other images, and the most cases that are read again for this."""

BETTER_EXCHANGED, USUAL = 3.0, 2.5
"""Smallest decrease of the sum of two deviations by an exchange of labels, and the largest deviation after it."""

TOLERANCES = (0.05, 0.5, 0.015)
"""Amounts added to the robust deviations: of logarithms of distances, of places (coarse voxels), and of skews."""

UNLIKE_IMAGES = {"noise", "wrapped", "empty-slices", "single-slice"}
"""Kinds of findings that explain why no label fits an image."""

DIRECTIONS = (("right", "left"), ("front", "back"), ("head", "feet"))


class BorderModel:
    """Model of the borders and places of the labels of a data set.

    Parameters
    ----------
    labels : sequence of LabelShape
        Labels with profiles, of cases without other findings.
    """

    def __init__(self, labels: Sequence[LabelShape]) -> None:
        profiles = _standardise(np.array([label.profiles[0] for label in labels], dtype=np.float64))
        self._is_used = np.isfinite(profiles).mean(0) > 0.5
        profiles[:, ~self._is_used] = np.nan
        self._usual = np.nanmedian(profiles[:, self._is_used], axis=0)
        residuals = np.nan_to_num(profiles[:, self._is_used] - self._usual)
        likely = np.argsort(np.square(residuals).sum(1))[: max(1, round((1 - TRIMMED) * len(labels)))]
        covariance = residuals[likely].T @ residuals[likely] / len(likely)
        size = len(covariance)
        covariance += (max(SHRINKAGE, CELLS / len(labels)) * np.trace(covariance) / size + 1e-9) * np.eye(size)
        self._root = np.linalg.cholesky(np.linalg.inv(covariance))
        distances = self._measure(np.array([label.profiles[0] for label in labels]))
        self._middle, self._width = _fit(distances, TOLERANCES[0])
        self._offsets = _fit(np.array([label.offset for label in labels]), TOLERANCES[1])
        self._skews = _fit(np.array([label.skew for label in labels]), TOLERANCES[2])

    @property
    def spread(self) -> np.ndarray:
        """Robust standard deviations of the places of labels, along right-left, front-back and head-feet."""
        return self._offsets[1]

    @classmethod
    def of(cls, labels: Sequence[LabelShape]) -> "BorderModel | None":
        """Return the model of a data set; None with too few cases, or profiles with too many gaps."""
        known = np.array([np.isfinite(label.profiles[0]) for label in labels])
        return cls(labels) if len(labels) >= FEWEST_PLACED and (known.mean(0) > 0.5).sum() >= FEWEST_CELLS else None

    def _measure(self, profiles: np.ndarray) -> np.ndarray:
        """Return logarithms of squared Mahalanobis distances; NaN for a profile with too many gaps."""
        residuals = _standardise(profiles.astype(np.float64))[..., self._is_used] - self._usual
        is_known = np.isfinite(residuals)
        residuals = np.where(is_known, residuals, 0)
        distances = np.log(np.square(residuals @ self._root).sum(-1) + 1e-12)
        measured: np.ndarray = np.where(is_known.sum(-1) >= FEWEST_CELLS, distances, np.nan)
        return measured

    def deviate(self, profiles: np.ndarray) -> np.ndarray:
        """Return the robust deviations of profiles; 0 for profiles at least as typical as the median case's."""
        return np.nan_to_num((self._measure(profiles) - self._middle) / self._width, nan=MOST_DEVIATION).clip(0)

    def rate(self, label: LabelShape) -> np.ndarray:
        """Return half the squared deviations of a label's border and place after each of the `MOVES`."""
        offsets, skews = (np.tile(place, (len(MOVES), 1)) for place in (label.offset, label.skew))
        for row, move in enumerate(MOVES):
            offsets[row, move.axis] += move.step
            if move.kind == "mirror":
                offsets[row, move.axis] *= -1
                skews[row, move.axis] *= -1
        places = [(of - middle) / width for of, (middle, width) in ((offsets, self._offsets), (skews, self._skews))]
        deviations = np.concatenate([self.deviate(label.profiles)[:, None], *places], axis=1)
        rated: np.ndarray = np.square(np.minimum(np.abs(deviations), MOST_DEVIATION)).sum(1) / 2
        return rated


def _standardise(profiles: np.ndarray) -> np.ndarray:
    is_known = np.isfinite(profiles)
    count = np.maximum(is_known.sum(-1, keepdims=True), 1)
    centred = profiles - np.where(is_known, profiles, 0).sum(-1, keepdims=True) / count
    spread = np.sqrt(np.square(np.where(is_known, centred, 0)).sum(-1, keepdims=True) / count)
    return centred / np.maximum(spread, 1e-12)


def _fit(values: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return medians along the first axis, and robust standard deviations plus a tolerance."""
    middle = np.nanmedian(values, axis=0)
    return middle, 1.4826 * np.nanmedian(np.abs(values - middle), axis=0) + tolerance


def report_displaced_labels(facts: Sequence[ComparedCase], found: Sequence[Finding], task: Task) -> Iterator[Finding]:
    """Remark on labels that fit another place, or another case's image, much better than their own.

    Parameters
    ----------
    facts : sequence of ComparedCase
        All cases.
    found : sequence of Finding
        All other findings; cases without findings count as sound.
    """
    odd = {finding.case for finding in found}
    explained = {finding.case for finding in found if finding.kind in UNLIKE_IMAGES}
    placed = [
        (fact.case, fact.label)
        for fact in facts
        if fact.label is not None and len(fact.label.profiles) and fact.case["case"] not in explained
    ]
    cases, labels = [case for case, _ in placed], [label for _, label in placed]
    is_sound = np.array([case["case"] not in odd for case in cases], dtype=bool)
    model = BorderModel.of([label for label, sound in zip(labels, is_sound, strict=True) if sound])
    if model is None:
        return
    exchanged = list(_list_exchanged(cases, labels, model, task))
    yield from exchanged
    names = {finding.case for finding in exchanged}
    yield from (one for one in _list_misplaced(cases, labels, model, is_sound) if one.case not in names)


def _list_misplaced(
    cases: Sequence[Case], labels: Sequence[LabelShape], model: BorderModel, is_sound: np.ndarray
) -> list[Finding]:
    """Remark on labels that fit much better after a move, unless more than a tenth of the labels do."""
    moves = MOVES[1:]
    rates = np.array([model.rate(label) for label in labels])
    costs = rates[:, 1:] - rates[:, :1]
    is_shift = np.array([move.kind == "shift" for move in moves])
    # Displaced labels and other faults would lower the costs.
    sound_costs = costs[is_sound]
    if np.quantile(sound_costs[:, is_shift].min(1), 1 - MOSTLY) < LEAST_COST:
        return []
    is_small = [move.kind == "shift" and abs(move.step) < model.spread[move.axis] * SPREADS for move in moves]
    costs[:, is_small | (np.quantile(sound_costs, 1 - MOSTLY, axis=0) < LEAST_COST)] = np.inf
    better = (costs.min(1) < -BETTER).nonzero()[0].tolist()
    if len(better) > max(1, RARE * len(cases)):
        return []
    best = {index: moves[int(costs[index].argmin())] for index in better}
    return [
        Finding.of(
            cases[index],
            "label-mirrored" if move.kind == "mirror" else "label-shifted",
            _describe(move, labels[index]),
            "label",
        )
        for index, move in best.items()
    ]


def _describe(move: Move, label: LabelShape) -> str:
    if move.kind == "mirror":
        return f"fits much better when mirrored {AXES[move.axis]}"
    towards = DIRECTIONS[move.axis][0 if move.step > 0 else 1]
    return f"fits much better when shifted about {abs(move.step) * label.steps[move.axis]} voxels towards the {towards}"


def _list_exchanged(
    cases: Sequence[Case], labels: Sequence[LabelShape], model: BorderModel, task: Task
) -> Iterator[Finding]:
    """Remark on pairs of cases whose labels fit each other's images much better than their own."""
    deviations = model.deviate(np.array([label.profiles[0] for label in labels]))
    order = np.argsort(-deviations)[:MOST_SUSPICIOUS]
    suspects = [int(index) for index in order if deviations[index] > SUSPICIOUS]
    volumes = {index: _read_coarse(cases[index], task) for index in suspects} if len(suspects) > 1 else {}
    gains = {}
    for pair in combinations(volumes, 2):
        (image, *border), (other_image, *other_border) = (volumes[index] for index in pair)
        if image.shape != other_image.shape:
            continue
        now = deviations[list(pair)]
        profiles = [_profile_on(other_image, *border), _profile_on(image, *other_border)]
        then = model.deviate(np.array(profiles))
        if then.max() < USUAL and (then < now).all():
            gains[pair] = float((now - then).sum())
    reported: set[int] = set()
    for pair, gain in sorted(gains.items(), key=lambda item: -item[1]):
        if gain > BETTER_EXCHANGED and not reported & {*pair}:
            reported |= {*pair}
            for index, other in (pair, pair[::-1]):
                yield Finding.of(cases[index], "labels-exchanged", f"with {cases[other]['case']}", "label")


def _read_coarse(case: Case, task: Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a case's image and labelled voxels, both coarse, and the sides of the coarse voxels (mm)."""
    image = read_volume(case["image"])
    label = read_label(case["label"], image, task)
    coarse, steps = pool(turn_upright(label, image) > 0)
    order, _ = anatomical_axes(image)
    sides = image.affine[:3, :3].norm(dim=0).numpy()[order] * steps
    return coarsen(turn_upright(image)), coarse, sides


def _profile_on(image: np.ndarray, labelled: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return the profile of a label on an image of the same shape."""
    border = describe_border(labelled, sides)
    return np.full(CELLS, np.nan) if border is None else take_profile(image, border)
