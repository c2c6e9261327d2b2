"""Paired comparison: SciPy's test on the same numbers, and the treatment of cases without a number."""

import math

import numpy as np
import pytest
from scipy.stats import wilcoxon

from volseg.errors import DataError
from volseg.evaluation.comparing import Method, compare_methods, comparison_table

RNG = np.random.default_rng(3)
FIRST, SECOND = RNG.uniform(0.7, 0.9, 20), RNG.uniform(0.75, 0.95, 20)


def method(name, scores, metric="Dice", labels=("1",)):
    """Return a method with the same scores for each label, of cases in an order of its own."""
    order = list(range(len(scores)))[:: 1 if name < "b" else -1]
    cases = [
        {
            "metrics": {label: {metric: float(scores[number])} for label in labels},
            "prediction_file": f"{name}/{number:02d}.nii.gz",
            "reference_file": None,
        }
        for number in order
    ]
    summary = {"foreground_mean": {}, "mean": {label: {metric: 0.0} for label in labels}, "metric_per_case": cases}
    return Method(name=name, summary=summary)


def test_the_test_is_scipys_and_cases_are_paired_by_id():
    [result] = compare_methods([method("a", FIRST), method("b", SECOND)])
    assert result["p_value"] == wilcoxon(SECOND, FIRST).pvalue == result["p_holm"]
    assert result["differences"] == tuple(SECOND - FIRST)
    assert result["mean_difference"] == pytest.approx((SECOND - FIRST).mean())
    assert result["low"] < result["mean_difference"] < result["high"]
    assert (result["num_better"], result["num_worse"]) == ((SECOND > FIRST).sum(), (SECOND < FIRST).sum())


def test_all_pairs_of_several_methods_are_corrected_together():
    methods = [
        method(name, scores, labels=("1", "2")) for name, scores in zip("abc", (FIRST, SECOND, FIRST**2), strict=True)
    ]
    results = compare_methods(methods)
    assert [(of["label"], of["first"], of["second"]) for of in results] == [
        (label, *pair) for label in "12" for pair in (("a", "b"), ("a", "c"), ("b", "c"))
    ]
    smallest = min(results, key=lambda of: of["p_value"])
    assert smallest["p_holm"] == pytest.approx(6 * smallest["p_value"])
    assert all(of["p_holm"] >= of["p_value"] for of in results)


def test_less_is_better_of_distances_and_infinite_ones_are_in_no_number_but_their_own():
    first = np.array([1.0, 2.0, math.inf, math.inf, 3.0, 1.0])
    second = np.array([0.5, math.inf, math.inf, 1.0, 3.0, math.nan])
    [result] = compare_methods([method("a", first, "HD95"), method("b", second, "HD95")])
    assert (result["num_better"], result["num_worse"], result["num_equal"]) == (1, 0, 1)
    assert (result["num_cases"], result["num_undefined"]) == (2, 3)
    assert result["mean_difference"] == pytest.approx(-0.25)  # of the first and the fifth case
    assert result["median_difference"] == -0.25
    assert result["p_value"] == wilcoxon([-0.5]).pvalue
    assert "1/0/1 of 2, 3 with an infinite distance left out" in comparison_table([result])


def test_equal_methods_do_not_differ_and_nothing_has_no_numbers():
    [result] = compare_methods([method("a", FIRST), method("b", FIRST)])
    assert (result["p_value"], result["mean_difference"], result["num_equal"]) == (1, 0, 20)
    [result] = compare_methods([method("a", [math.nan] * 3), method("b", [math.nan] * 3)])
    assert (result["num_cases"], result["p_value"]) == (0, 1)
    assert math.isnan(result["mean_difference"])
    assert math.isnan(result["median_difference"])


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            [("a", FIRST), ("b", FIRST[:5])],
            r"5 case\(s\) are in both, 15 only in the first \(05, 06, 07, 08, 09 and 10",
        ),
        ([("a", FIRST), ("b", FIRST, "Dice", "12")], r"1 label\(s\) are in both, 0 only in the first \(none\), 1 only"),
        ([("a", FIRST)], "at least two methods, got 1"),
        ([("a", FIRST), ("a", FIRST)], "two methods are called 'a'"),
    ],
)
def test_what_is_not_the_same_is_refused_in_words(methods, message):
    with pytest.raises(DataError, match=message):
        compare_methods([method(*arguments) for arguments in methods])
