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


@pytest.mark.parametrize("most_draws", [1_000_000, 1000])
def test_the_interval_is_scipys_draw_for_draw(scores, monkeypatch, most_draws):
    monkeypatch.setattr(intervals, "_MOST_DRAWS", most_draws)  # the second: four resamples at a time
    labels, overall = mean_intervals(scores)
    for ours, column in zip([*labels, overall], [*scores.T, scores.mean(axis=1)], strict=True):
        theirs = stats.bootstrap(
            (column,), np.mean, n_resamples=10_000, confidence_level=0.95, method="percentile", rng=SEED
        ).confidence_interval
        # The same draws; sums in another order differ by rounding.
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
        assert ours.mean == pytest.approx(column.mean(), rel=1e-12)
        assert ours.std == pytest.approx(column.std(ddof=1), rel=1e-12)


def test_cases_without_a_label_do_not_count_there(scores):
    (full, _), _ = mean_intervals(scores)
    holes = np.column_stack([scores, np.full(208, np.nan)])
    holes[::2, 1] = np.nan
    (same, sparse, nowhere), overall = mean_intervals(holes)
    assert same == full
    assert (sparse.num_cases, nowhere.num_cases, overall.num_cases) == (104, 0, 208)
    assert sparse.mean == pytest.approx(scores[1::2, 1].mean())
    # Half the cases: an interval wider by the root of two, within the noise of other cases' spread.
    assert (sparse.high - sparse.low) / (full.high - full.low) == pytest.approx(math.sqrt(2), rel=0.3)
    assert all(map(math.isnan, (nowhere.mean, nowhere.std, nowhere.low, nowhere.high)))
    cases = [EvaluatedCase(metrics={key: {"Dice": of} for key, of in enumerate(row)}) for row in holes.tolist()]
    summary = summarise(cases)
    assert [same.mean, sparse.mean] == pytest.approx([summary["mean"][key]["Dice"] for key in "01"], rel=1e-12)
    assert overall.mean == pytest.approx((full.mean + sparse.mean) / 2)
    assert overall == mean_intervals(holes[:, :2])[1]  # the label that is nowhere changes nothing


def test_few_cases_have_an_interval_and_a_single_one_has_no_spread():
    rare = np.full((30, 1), np.nan)
    rare[:2, 0] = 0.5, 0.7  # about one resample in eight holds neither
    (label,), _ = mean_intervals(rare)
    assert (label.low, label.high) == pytest.approx((0.5, 0.7))
    (label,), _ = mean_intervals([[0.8]])
    assert math.isnan(label.std)
    assert (label.low, label.mean, label.high) == pytest.approx((0.8, 0.8, 0.8))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], r"scores \(cases, labels\), at least one of each, got shape \(0,\)"),
        (np.zeros((0, 2)), r"got shape \(0, 2\)"),
        ([0.8, 0.9], r"got shape \(2,\)"),
    ],
)
def test_what_has_no_interval_is_refused(scores, message):
    with pytest.raises(DataError, match=message):
        mean_intervals(scores)
