import math

import numpy as np
import pytest
from scipy import stats

from volseg.errors import DataError
from volseg.evaluation import intervals
from volseg.evaluation.intervals import SEED, mean_intervals
from volseg.evaluation.summary import EvaluatedCase, summarise


@pytest.fixture
def scores():
    """Return Dice-like numbers of 208 cases and two labels."""
    return np.random.default_rng(7).beta(20, 3, (208, 2))


def test_the_interval_is_scipys_draw_for_draw(scores):
    labels, overall = mean_intervals(scores)
    for ours, column in zip([*labels, overall], [*scores.T, scores.mean(axis=1)], strict=True):
        theirs = stats.bootstrap(
            (column,), np.mean, n_resamples=10_000, confidence_level=0.95, method="percentile", rng=SEED
        ).confidence_interval
        # The same draws; sums in another order differ by rounding.
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
        assert ours.mean == pytest.approx(column.mean(), rel=1e-12)
        assert ours.std == pytest.approx(column.std(ddof=1), rel=1e-12)


def test_drawing_in_parts_changes_nothing(scores, monkeypatch):
    whole = mean_intervals(scores)
    monkeypatch.setattr(intervals, "_MOST_DRAWS", 1000)  # four resamples at a time
    assert mean_intervals(scores) == whole


def test_the_interval_of_a_large_sample_is_the_normal_one(scores):
    (label, _), _ = mean_intervals(scores)
    error = label.std / math.sqrt(208)
    # Skewness and 10,000 draws move the ends by a few hundredths of a standard error; 0.15 is several times that.
    assert label.low == pytest.approx(label.mean - 1.96 * error, abs=0.15 * error)
    assert label.high == pytest.approx(label.mean + 1.96 * error, abs=0.15 * error)


def test_cases_without_a_label_do_not_count_there(scores):
    holes = scores.copy()
    holes[::2, 1] = np.nan
    (full, sparse), overall = mean_intervals(holes)
    assert full == mean_intervals(scores)[0][0]
    assert sparse.num_cases == 104
    assert sparse.mean == pytest.approx(scores[1::2, 1].mean())
    assert overall.num_cases == 208
    assert overall.mean == pytest.approx((full.mean + sparse.mean) / 2)
    # Half the cases: an interval wider by the root of two, within the noise of other cases' spread.
    assert (sparse.high - sparse.low) / (full.high - full.low) == pytest.approx(math.sqrt(2), rel=0.3)


def test_means_are_those_of_the_summary(scores):
    scores[:50, 0] = np.nan
    scores[40:60, 1] = np.nan  # some cases have neither
    cases = [EvaluatedCase(metrics={1: {"Dice": a}, 2: {"Dice": b}}) for a, b in scores.tolist()]
    summary = summarise(cases)
    labels, overall = mean_intervals(scores)
    assert [label.mean for label in labels] == pytest.approx([summary["mean"][k]["Dice"] for k in "12"], rel=1e-12)
    assert overall.mean == pytest.approx(summary["foreground_mean"]["Dice"], rel=1e-12)


def test_a_label_that_is_nowhere_has_no_number_and_is_left_out_of_the_mean(scores):
    (there, nowhere), overall = mean_intervals(np.stack([scores[:, 0], np.full(208, np.nan)], axis=1))
    assert nowhere.num_cases == 0
    assert all(map(math.isnan, (nowhere.mean, nowhere.std, nowhere.low, nowhere.high)))
    assert overall == there


def test_a_rare_label_keeps_an_interval(scores):
    rare = np.full((30, 1), np.nan)
    rare[:2, 0] = 0.5, 0.7  # about one resample in eight holds neither
    (label,), _ = mean_intervals(rare)
    assert (label.low, label.high) == pytest.approx((0.5, 0.7))


def test_one_case_has_no_spread():
    (label,), _ = mean_intervals([[0.8]])
    assert math.isnan(label.std)
    assert (label.low, label.mean, label.high) == pytest.approx((0.8, 0.8, 0.8))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], r"scores of \(cases, labels\), at least one of each, got shape \(0,\)"),
        (np.zeros((0, 2)), r"got shape \(0, 2\)"),
        ([0.8, 0.9], r"got shape \(2,\)"),
    ],
)
def test_what_has_no_interval_is_refused(scores, message):
    with pytest.raises(DataError, match=message):
        mean_intervals(scores)
