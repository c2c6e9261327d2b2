"""Compute percentile bootstrap intervals of means over cases.

``scipy.stats.bootstrap`` does not suffice: a case that lacks a label has no Dice for it and must not count, and the
foreground mean is a mean of means, with each case drawn together for all labels. Where neither matters, the two agree
up to rounding, draw for draw (a test compares them).

Cases are resampled; the trained networks are fixed. The interval does not cover the variation between training seeds.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from volseg.errors import DataError

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
SEED = 12345

# Draws in memory at once: some 10 MB per label for any number of cases.
_MOST_DRAWS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanInterval:
    """A mean over cases, its spread and its interval; NaN without values."""

    num_cases: int
    """Number of cases with a value."""
    mean: float
    std: float
    """Standard deviation over cases, with ``num_cases - 1`` in the denominator."""
    low: float
    high: float


def mean_intervals(scores: ArrayLike) -> tuple[list[MeanInterval], MeanInterval]:
    """Return the mean with its interval of `CONFIDENCE` for each label, and for the mean over the labels.

    Parameters
    ----------
    scores
        ``(cases, labels)``; NaN if a case has no value for a label: the case is then not part of the label's mean.

    Returns
    -------
    labels : list of MeanInterval
        In the order of the columns. A resample without any case of a label is left out of that label's interval.
    overall : MeanInterval
        The mean over labels of the mean over cases, as `volseg.evaluation.summary` defines it; its standard deviation
        is that of each case's mean over its labels.

    Raises
    ------
    DataError
        If there is no case or no label.

    References
    ----------
    .. [1] Efron, Bootstrap methods: another look at the jackknife, Ann. Statist. 7 (1979), 1-26,
       doi:10.1214/aos/1176344552.

    Examples
    --------
    >>> (label,), overall = mean_intervals([[0.8], [0.9], [1.0]])
    >>> round(label.mean, 3), round(label.std, 3), label.low <= label.mean <= label.high
    (0.9, 0.1, True)
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(f"intervals need scores (cases, labels), at least one of each, got shape {values.shape}")
    resampled = _resample_means(values)
    per_case = _nan_mean(values, axis=1)
    labels = [
        _compute_interval(column, float(mean), means)
        for column, mean, means in zip(values.T, _nan_mean(values, axis=0), resampled.T, strict=True)
    ]
    overall_mean = float(_nan_mean(_nan_mean(values, axis=0), axis=0))
    return labels, _compute_interval(per_case, overall_mean, _nan_mean(resampled, axis=1))


def _compute_interval(values: NDArray[np.float64], mean: float, means: NDArray[np.float64]) -> MeanInterval:
    known, means = values[~np.isnan(values)], means[~np.isnan(means)]
    tails = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    low, high = np.percentile(means, tails) if means.size else (math.nan, math.nan)
    return MeanInterval(
        num_cases=known.size,
        mean=mean,
        std=float(known.std(ddof=1)) if known.size > 1 else math.nan,
        low=float(low),
        high=float(high),
    )


def _resample_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over drawn cases, ``(resamples, labels)``; a case is drawn with all its labels.

    Each resample draws as many cases as there are, with replacement.
    """
    num_cases, generator = len(values), np.random.default_rng(SEED)
    step = max(1, _MOST_DRAWS // num_cases)
    means = []
    for done in range(0, NUM_RESAMPLES, step):
        drawn = generator.integers(0, num_cases, (min(step, NUM_RESAMPLES - done), num_cases))
        means.append(_nan_mean(values[drawn], axis=1))
    return np.concatenate(means)


def _nan_mean(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)  # the mean is then NaN
        return np.asarray(np.nanmean(values, axis=axis))
